"""The section `env`: episodes of several turns."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lorad.spec.numbers import Part, Positive, PositiveFloat
from lorad.spec.user_code import EnvName, memory_bytes

VERIFIERS = "verifiers:"  # an environment of that package, and a source of its rows
_ID = re.compile(rf"{VERIFIERS}([A-Za-z0-9][\w.-]*/)?([A-Za-z0-9][\w.-]*)(@[\w.+-]+)?")


class EnvSpec(Part, frozen=True):
    """The environment in which a sample is an episode of several turns, with a reward of its own.

    Attributes:
        name: `lookup`, `path/to/file.py:Class`, or `path/to/file.py:function` of an agent program, an
            `async def`; `verifiers:ID` is an environment that the package verifiers plays, installed for
            env.python; null is none: a sample is one completion.
        args: keywords of its constructor, or of the function. With `verifiers:ID` those of its
            `load_environment`; for a taskset what verifiers writes as its block `env`, such as
            `{taskset: {split: train}, agent: {runtime: {type: docker}}}`.
        turns: most turns of the model in an episode.
        max_tokens: most tokens of an episode, prompt included; null is what the model has room for. An
            episode ends where a further turn would not fit.
        format: how observations become tokens. chat renders them with the chat template, text takes them as
            they are; auto does what data.chat_template has done with the prompts. qwen3.5, glm-5, kimi-k2 and
            other names are renderers (`lorad[envs]`), for templates that do not say what follows a turn; what
            the model thought stays.
        timeout: seconds for one turn; then its process is killed.
        episode_timeout: seconds that the environment may take for all turns of an episode together; for an
            agent program, from its call to its end.
        start_timeout: seconds for the import of its file, and of all that this imports, in each process.
        retry: how often an episode that got no answer is brought back to its turn and asked again. Then it is
            left out of the step, like a sample whose reward failed.
        workers: processes, of training and of evals each; 1 by default with `verifiers:ID`.
        concurrency: agent programs that a process runs at a time, as tasks of one event loop; a program that
            blocks instead of waiting holds the others up. One that ends its process costs the others another
            try, each in a process for itself. 16 by default with `verifiers:ID`.
        python: interpreter that runs it, with packages of its own, from Python 3.10 on; for a class it needs
            msgspec. null is that of lorad.
        pass_env: variables that the environment finds beside those that every program needs; no secret is
            there unless named here.
        sandbox: bubblewrap runs the processes without network, home and other processes, and shows them the
            system, the interpreter and the folder of the file, read-only; it has to be installed. An agent
            program still speaks with the model.
        memory: limit of each process, in bytes or as in `4GiB`; null is half of the machine's memory.
    """

    name: str | None = None
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    turns: Positive = 8
    max_tokens: Positive | None = None
    format: Annotated[str, Meta(pattern=r"^[a-z0-9.-]+$")] = "auto"
    timeout: PositiveFloat = 30.0
    episode_timeout: PositiveFloat = 600.0
    start_timeout: PositiveFloat = 300.0
    retry: Annotated[int, Meta(ge=0, le=10)] = 1
    workers: Annotated[int, Meta(ge=1, le=64)] = 2
    concurrency: Annotated[int, Meta(ge=1, le=256)] = 1
    python: str | None = None
    pass_env: list[EnvName] = msgspec.field(default_factory=list)
    sandbox: Literal["none", "bubblewrap"] = "none"
    memory: int | str | None = None

    def __post_init__(self) -> None:
        memory_bytes(self.memory)
        if (self.name or "").startswith(VERIFIERS) and not self.package:
            raise ValueError(f"name is verifiers:ID, such as verifiers:owner/wordle, not {self.name}")

    @property
    def package(self) -> str:
        """Return the name of an environment of verifiers, without owner and version; "" for any other."""
        match = _ID.fullmatch(self.name or "")
        return match[2] if match else ""

    @property
    def memory_bytes(self) -> int:
        """Return the limit of `memory`; 0 where none is given."""
        return memory_bytes(self.memory)
