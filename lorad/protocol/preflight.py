"""What the daemon asks the process that checks a spec, and what it answers: one JSON line each way."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from lorad.bounds import CHECK_NAMES, CHECK_WARNINGS, LINE, TEXT
from lorad.spec.lora import Lora
from lorad.spec.notify import Notify
from lorad.spec.numbers import Loggers

_Count = Annotated[int, Meta(ge=0)]
_Line = Annotated[str, Meta(max_length=LINE)]
_Names = Annotated[list[_Line], Meta(max_length=CHECK_NAMES)]
_Text = Annotated[str, Meta(max_length=TEXT)]


class SpecQuestion(Struct, frozen=True, kw_only=True):
    """A spec to check, and where it would run.

    cwd: the directory where relative paths of the spec begin.
    device: `cpu` or `cuda:<n>`.
    devices: the number of GPUs.
    available: bytes that are free, on a CPU, which None looks up; of GPUs, all bytes of the smallest.
    warm: a pool has loaded the base already, so no memory for it is needed.
    backends: backends of the box; None to read config.yaml, which not every user may.
    reference: the directory of the adapter that KL is measured against; None for the base.
    loggers: loggers of runs whose spec names none.
    look: whether the data are to be described, too.
    notify: receivers of runs whose spec names nobody.
    cluster: cluster of the box; None where it has none.
    written: the keys of `lora` that the user wrote, and where; the adapter of lora.adapter_path supplies the
        others. None: nothing of `lora` is open.
    """

    spec: dict[str, Any]
    cwd: str
    device: str = "cpu"
    devices: int = 1
    available: int | None = None
    warm: bool = False
    backends: dict[str, Any] | None = None
    reference: str | None = None
    loggers: Loggers = []
    look: bool = False
    notify: list[Notify] = []
    cluster: dict[str, Any] | None = None
    written: dict[str, str] | None = None


class BaseFacts(Struct, frozen=True, kw_only=True):
    """The facts of a base, a run's adapter and its teacher that a pool needs.

    modules: the names of the linears that the adapter changes.
    linears: the leaf names of all linears of the base but those of experts.
    of_experts: the leaf names of the linears of experts.
    model_type: the base's, as config.json has it.
    max_positions: the base's context length in tokens.
    teacher_path: the directory of the teacher, where that is another model; "" otherwise.
    routes: the engine records the routes of tokens.
    """

    modules: _Names = []
    linears: _Names = []
    of_experts: _Names = []
    model_type: _Line = ""
    max_positions: _Count = 0
    teacher_path: _Line = ""
    routes: bool = False


class Rate(Struct, frozen=True):
    """A learning rate that fits a run, and what it fits: `grpo on qwen3 of hidden size 4096`.

    critic: the rate that fits its critic, where it has one.
    """

    lr: float
    why: _Text = ""
    critic: float | None = None


class Lengths(Struct, frozen=True):
    """Lengths in tokens."""

    least: _Count
    median: _Count
    most: _Count


class DataLook(Struct, frozen=True, kw_only=True):
    """The training data as a person would look at them.

    looked_at: prompts that were measured: all of a file, the first of a task, which never ends.
    prompts: their lengths, before any is cut; rows that are left out for another reason are not among them.
    completions: lengths of what is trained on; None where completions are sampled.
    cut: prompts, or samples of sft and dpo, that are shortened (data.too_long: truncate).
    prompt: the first of training, with the chat template applied.
    answer: what its row has for an answer, as text.
    answer_type: what it is there, "" for text.
    said: the completions of that row, where those are trained on.
    """

    looked_at: _Count = 0
    prompts: Lengths
    completions: Lengths | None = None
    cut: _Count = 0
    prompt: str = ""
    prompt_tokens: _Count = 0
    answer: str = ""
    answer_type: str = ""
    said: list[str] = []


class SpecFacts(BaseFacts, frozen=True, kw_only=True):
    """The facts of a checked spec.

    model_path: the directory that the model resolved to.
    model_type, hidden_size: as config.json has them; "" and 0 where it does not.
    parameters: parameters of the base.
    lora: `lora` of the spec, with what it leaves open filled in; None from an older lorad.
    reference_parameters: parameters of the adapter that KL is measured against; 0 for the base.
    critic_parameters: parameters of the run's critic, its head left out; 0 without one.
    memory_needed, memory_available: bytes; None where nobody looked.
    memory_parts: the bytes that are needed, by what takes them.
    dataset_size: rows of the training data; None for a task, which never ends.
    dropped: rows that are too long.
    data_format: what the rows are, where completions are trained on; "" otherwise.
    eval_size: held-out problems.
    eval_scored: whether evaluations have the reward of greedy completions.
    eval_likely: whether they have the likelihood of held-out completions.
    warnings: what is allowed and probably not meant, a sentence each.
    rate: what trainer.lr is where it is not given; None from an older lorad.
    loggers: loggers of the run, by its spec, or else by config.yaml.
    look: the data, where somebody asked to see them.
    notify: who hears of the run: by its spec, or else by config.yaml.
    """

    model_path: _Line = ""
    model_dtype: _Line = ""
    model_type: _Line = ""
    hidden_size: _Count = 0
    parameters: _Count = 0
    adapter_parameters: _Count = 0
    lora: Lora | None = None
    reference_parameters: _Count = 0
    critic_parameters: _Count = 0
    memory_needed: _Count = 0
    memory_available: _Count | None = None
    memory_parts: Annotated[dict[_Line, _Count], Meta(max_length=CHECK_WARNINGS)] = {}
    dataset_size: _Count | None = None
    dropped: _Count = 0
    data_format: _Line = ""
    eval_size: _Count = 0
    eval_scored: bool = True
    eval_likely: bool = False
    warnings: Annotated[list[_Text], Meta(max_length=CHECK_WARNINGS)] = []
    rate: Rate | None = None
    loggers: Loggers = []
    look: DataLook | None = None
    notify: list[Notify] = []


class ErrorFacts(Struct, frozen=True):
    """An error as `lorad.errors.to_wire` writes it."""

    kind: str = ""
    message: str = ""
    hint: str = ""
    where: str = ""
    key: str = ""
    problem: str = ""
    others: "list[ErrorFacts]" = []


class PreflightLine(Struct, frozen=True, kw_only=True):
    """A line of a check: what it is doing; in the last one the facts, or the error that it ended with."""

    facts: SpecFacts | None = None
    error: ErrorFacts | None = None
    doing: _Line = ""
