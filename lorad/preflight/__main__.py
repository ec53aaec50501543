"""Look at everything that a spec names before anything starts: model, adapter, data, reward, memory.

`python -m lorad.preflight` reads a SpecQuestion on stdin and prints PreflightLines, see
`lorad.protocol.preflight`. What user code prints meanwhile goes to stderr. The exit code is 0.
"""

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    from msgspec.structs import asdict, replace

    from lorad.adapters.adapter import AdapterConfig
    from lorad.adapters.peft import outline, read_peft
    from lorad.adapters.readers import refuse_interleaved
    from lorad.adapters.targets import leaf
    from lorad.adapters.validate import expected_shapes, refuse_unfit, validate
    from lorad.backends.setup import adapter_config, backend_setup, needs_base, served_experts, targets_of
    from lorad.backends.spread import check_spread, places
    from lorad.box.cluster import Cluster
    from lorad.box.config import Backend, Config, from_plain
    from lorad.box.config import load as load_config
    from lorad.box.machine import available_memory
    from lorad.box.paths import Home, default_home
    from lorad.driver.rewards import Rewarder
    from lorad.driver.user.functions import UserFunctions
    from lorad.errors import AdapterRefused, SpecError, to_wire
    from lorad.limits.arguments import RANKED
    from lorad.limits.check import refuse
    from lorad.loggers import choose
    from lorad.models.directory import read_config
    from lorad.models.facts import ModelFacts, check_tensors, check_whole, known_config, read_facts
    from lorad.models.families import FUSED
    from lorad.notify import deliver
    from lorad.preflight.backends import check_backends
    from lorad.preflight.directory import check_blocks, check_weights, checked_tokenizer, model_directory
    from lorad.preflight.look import look_at
    from lorad.preflight.pool_memory import Numbers, check_memory, memory_of_gpus, pool_memory, step_of
    from lorad.preflight.rewards import check_reward
    from lorad.preflight.routes import check_routes, records_routes
    from lorad.preflight.rows import check_rows, judged_rows
    from lorad.preflight.start import check_start, naming_adapter, source_of, supplied_spec
    from lorad.preflight.teacher import Teacher, check_teacher
    from lorad.preflight.telling import begin, telling
    from lorad.preflight.trainers import (
        check_adapted,
        check_bits,
        check_devices,
        check_dtype,
        check_names,
        check_trainer,
        settled_mode,
    )
    from lorad.preflight.user_code import check_env, check_sets, open_env, refuse_unset
    from lorad.protocol.preflight import BaseFacts, ErrorFacts, PreflightLine, SpecFacts, SpecQuestion
    from lorad.rl.completions.targets import TargetDataset, load_held_out, load_train
    from lorad.rl.data import Dataset, Example
    from lorad.rl.doubts import doubts, refuse_contradictions
    from lorad.rl.sources import SUFFIXES, read_rows
    from lorad.rl.tasks import TASKS
    from lorad.rl.tokenizer import Tokenizer
    from lorad.servers.table import NAMES, SERVERS
    from lorad.spec.data import names_of
    from lorad.spec.model import Spec, convert, fitted
    from lorad.spec.notify import Notify
    from lorad.spec.numbers import Loggers

_T = TypeVar("_T")
_Shapes = dict[str, tuple[int, int]]
_OPENED_AS = (
    "Paths of a spec are opened as the user who starts the run; relative ones begin where it is started."
)
_FIRST_TO_GO = "500"  # of 1000
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def preflight(
    spec: Spec,
    *,
    cwd: Path,
    loggers: Loggers | None = None,
    notify: list[Notify] | None = None,
    look: bool = False,
    backends: dict[str, Backend] | None = None,
    cluster: Cluster | None = None,
    written: dict[str, str] | None = None,
    **machine: Any,
) -> SpecFacts:
    """Check a spec like `_checked`, which stops at the first error; other errors found on disk join that one.

    loggers, notify: what runs have whose spec names none; None to read config.yaml.
    backends, cluster: what the box has; where backends is None, config.yaml has both.
    look: whether to describe the data, too.
    written: see SpecQuestion.
    """
    begin("reading the model")
    try:
        is_known = None not in (loggers, notify, backends)
        box = Config() if is_known else load_config(Home(default_home()).config)
        usual = box.loggers if loggers is None else loggers
        chosen = own_or_usual(spec.loggers, usual, choose.refuse_unfit)
        usual_notify = box.notify if notify is None else notify
        receivers = own_or_usual(spec.notify, usual_notify, partial(deliver.refuse_unfit, cwd=cwd))
        if backends is not None:
            box = Config(backends=backends, cluster=cluster)
        with naming_adapter(spec, written):
            if spec.lora.adapter_path is not None:
                directory = model_directory(spec.model.path, cwd, any_architecture=not needs_base(spec))
                spec = supplied_spec(spec, _model_facts(spec, directory), written, cwd)
            facts, data, tokenizer = _checked(spec, box, cwd=cwd, **machine)
        seen = look_at(data, tokenizer) if look and data.take(0, 1) else None
        return replace(facts, loggers=chosen, notify=receivers, look=seen)
    except SpecError as error:
        others = {other.message: other for other in _wrong_on_disk(spec, cwd)}
        others.pop(error.message, None)
        error.others = (*error.others, *others.values())
        raise


def own_or_usual(own: _T | None, usual: _T, refuse_unfit: Callable[[_T], None]) -> _T:
    """Return what the spec names, else what config.yaml does. Raises SpecError where `refuse_unfit` does."""
    if own is not None:
        refuse_unfit(own)
        return own
    try:
        refuse_unfit(usual)
    except SpecError as error:
        raise error.at("config.yaml") from None
    return usual


def _wrong_on_disk(spec: Spec, cwd: Path) -> Iterator[SpecError]:
    """Yield an error for everything that the spec names and that is missing or unreadable on disk."""
    sets = (each.data for each in spec.eval.sets.values())
    sources = [*names_of(spec.data.train), *names_of(spec.data.eval), *sets]
    looks: list[Callable[[], object]] = [
        lambda: model_directory(spec.model.path, cwd, any_architecture=not needs_base(spec)),
        *(partial(_read_first_row, source, cwd) for source in sources),
        lambda: UserFunctions(spec.algorithm, cwd),
    ]
    for judged in (spec, *spec.of_sources.values()):
        looks += [partial(Rewarder, judged.rewards, cwd), partial(open_env, judged.env, cwd)]
    if spec.lora.adapter_path is not None:
        looks.append(partial(read_peft, source_of(spec, cwd)))
    for look in looks:
        try:
            look()
        except SpecError as error:
            yield error
        except (AdapterRefused, OSError):  # said by `checked`, once the rest is right
            pass


def _read_first_row(source: str, cwd: Path) -> None:
    """Read the first row of a source that is a file. Raises SpecError."""
    if source not in TASKS and Path(source).suffix.lower() in SUFFIXES:
        next(iter(read_rows(source, "train", cwd)), None)


def _checked(
    spec: Spec,
    box: Config,
    *,
    cwd: Path,
    device: str = "cpu",
    devices: int = 1,
    available: int | None = None,
    warm: bool = False,
    reference: Path | None = None,
) -> tuple[SpecFacts, Dataset, Tokenizer]:
    """Check the spec of a `SpecQuestion`: return its facts, data and tokenizer. Raises SpecError."""
    refuse_contradictions(spec)
    check_backends(spec, box)
    is_here, device = _where(spec, box, device, devices)
    warnings = check_trainer(spec, box, device, elsewhere=not is_here) + check_bits(spec, device)
    directory = model_directory(spec.model.path, cwd, any_architecture=not needs_base(spec))
    model = _model_facts(spec, directory)
    refuse(backend_setup(spec, model, device=device))
    shapes = targets_of(spec.trainer.backend, model.linears, served_experts(spec.rollout.backend, model))
    warnings += check_adapted(spec, model, shapes) + check_routes(spec, model)
    adapter = adapter_config(spec, model)
    refuse(backend_setup(spec, model, adapter, device))
    warnings += check_names(spec, model, adapter, directory, box, device) if is_here else []
    check_start(spec, model, directory, cwd)
    spec = fitted(spec, model.max_positions)
    teacher = check_teacher(spec, cwd, directory, model)
    taught = teacher.facts if teacher else None
    numbers = _numbers(spec, adapter, shapes, reference, taught or model)
    tokenizer = checked_tokenizer(directory)
    begin(f"importing {spec.env.name}" if spec.env.package else "reading the data")
    data = load_train(spec, tokenizer, cwd)
    spec = settled_mode(spec, box)
    parts = pool_memory(spec, model, adapter, numbers, step_of(spec, data), device, taught, warm=warm)
    free = available or (available_memory() if device == "cpu" and is_here else None)
    sides = [] if warm or not is_here else memory_of_gpus(spec, model, adapter, numbers, data)
    check_memory(parts, sides, free, device, spec.pool.memory_fraction)
    held_out = load_held_out(spec, tokenizer, cwd) if _is_evaluated(spec) else []
    is_scored, doubtful = _check_user_code(spec, data, held_out, tokenizer, cwd)
    warnings += doubtful + check_rows(spec, data, held_out, tokenizer, is_scored=is_scored)
    warnings += check_sets(spec, tokenizer, cwd) + _warnings(spec, adapter, tokenizer, data, held_out)
    base = replace(_base_facts(adapter, model, teacher), routes=records_routes(spec, model))
    if spec.rollout.backend in SERVERS:
        from lorad.preflight.servers import check_server  # its HTTP client takes as long as all the rest

        warnings += check_server(
            *(spec, box, base, directory, cwd), device=device, stops=tokenizer.eos_ids, elsewhere=not is_here
        )
    facts = SpecFacts(
        **asdict(base),
        model_path=str(directory),
        model_dtype=model.dtype,
        hidden_size=model.hidden_size,
        parameters=model.parameters,
        adapter_parameters=numbers.adapter,
        lora=replace(spec.lora, experts=replace(spec.lora.experts, rank=adapter.rank_of_experts))
        if adapter.experts
        else spec.lora,
        reference_parameters=numbers.frozen,
        critic_parameters=numbers.critic,
        memory_needed=sum(parts.values()),
        memory_parts=parts,
        memory_available=free if device == "cpu" else None,
        dataset_size=data.size,
        dropped=data.dropped,
        data_format=data.form if isinstance(data, TargetDataset) else "",
        eval_size=len(held_out),
        eval_scored=is_scored,
        eval_likely=any(example.targets for example in held_out),
        warnings=warnings + check_dtype(spec, device) + doubts(spec),
    )
    return facts, data, tokenizer


def _where(spec: Spec, box: Config, device: str, count: int) -> tuple[bool, str]:
    """Return whether this machine, of `count` devices, may have the run, and on which device it computes.

    Raises SpecError.
    """
    where = places(spec, box.cluster, device, count)
    check_spread(spec, box.cluster, where)
    if "local" in where or box.cluster is None:
        check_devices(spec, device, count)
        return True, device
    return False, "cuda:0" if box.cluster.has_gpus else "cpu"


def _is_evaluated(spec: Spec) -> bool:
    return spec.eval.every > 0 and spec.algorithm.kind != "tinker"


def _numbers(
    spec: Spec, adapter: AdapterConfig, shapes: _Shapes, reference: Path | None, referred: ModelFacts
) -> Numbers:
    """Count the parameters of the adapter, of the `reference` for KL, whose base is `referred`, and of the
    critic.

    Raises SpecError for a reference that does not fit.
    """
    algorithm = spec.algorithm
    size = sum(map(math.prod, expected_shapes(adapter, shapes).values()))
    frozen = size if algorithm.kl.reset_every else 0
    if reference is not None:
        try:
            outlined = outline(reference)
            experts = served_experts(spec.rollout.backend, referred)
            fitting = targets_of(spec.trainer.backend, referred.linears, experts)
            refuse_interleaved(outlined, referred.model_type, FUSED)
            refuse_unfit(outlined, fitting)
            supplied = read_peft(reference)
            validate(supplied, fitting)
        except AdapterRefused as error:
            raise SpecError(error.message, key="algorithm.kl.reference", hint=error.hint) from error
        frozen = max(frozen, sum(tensor.size for tensor in supplied.tensors.values()))
    critic = size * (algorithm.critic.rank or adapter.rank) // adapter.rank * algorithm.has_critic
    return Numbers(size, frozen, critic)


def _model_facts(spec: Spec, directory: Path) -> ModelFacts:
    """Check the weight files, and the tensors that the pool's own process loads. Raises SpecError."""
    config = known_config(directory)
    if needs_base(spec) and config is None:
        try:
            read_config(directory)
        except SpecError as error:
            if spec.trainer.backend not in RANKED:
                raise
            hint = f"The {spec.trainer.backend} trainer may have it; set rollout.backend to {NAMES}."
            raise SpecError(error.problem, key="rollout.backend", hint=hint) from error
    check_weights(directory)
    if needs_base(spec) and config is not None:
        check_tensors(directory, config)
    elif config is not None:
        check_whole(directory, config)
    facts = read_facts(directory)
    check_blocks(spec, facts)
    return facts


def _base_facts(adapter: AdapterConfig, model: ModelFacts, teacher: Teacher | None) -> BaseFacts:
    return BaseFacts(
        modules=[*adapter.modules],
        linears=sorted({leaf(name) for name in model.linears}),
        of_experts=sorted({leaf(name) for name in model.experts}),
        model_type=model.model_type,
        max_positions=model.max_positions,
        teacher_path=str(teacher.directory) if teacher else "",
    )


def _check_user_code(
    spec: Spec, data: Dataset, held_out: list[Example], tokenizer: Tokenizer, cwd: Path
) -> tuple[bool, list[str]]:
    """Check that rewards, environments, losses and advantages can be loaded, and try them.

    Raises SpecError. Returns whether evals have a reward, and warnings.
    """
    if spec.algorithm.kind == "tinker":
        return False, []
    begin("loading the reward")
    algorithm = spec.algorithm
    refuse_unset(algorithm.user_code.env, "algorithm.user_code.env")
    with UserFunctions(algorithm, cwd) as functions:
        for function in functions.all:
            function.start()
            function.try_out(with_reference=algorithm.has_reference)
    is_scored = True
    warnings = list[str]()
    for part in judged_rows(spec, data, held_out):
        try:
            if part.spec.env.name is not None:
                check_env(part.spec, part.first[0], tokenizer, cwd)
                continue
            for reward in part.spec.rewards:
                refuse_unset(reward.env, "reward.env")
            has_reward, doubtful = check_reward(part, tokenizer, cwd)
        except SpecError as error:
            problem = f"{part.source}: {error.problem}" if part.source else error.problem
            raise SpecError(problem, key=error.key, hint=error.hint) from error
        is_scored &= has_reward
        warnings += doubtful
    return is_scored, warnings


def _warnings(
    spec: Spec, adapter: AdapterConfig, tokenizer: Tokenizer, data: Dataset, held_out: list[Example]
) -> list[str]:
    """List settings that are allowed and probably not meant."""
    late = " and ".join(tokenizer.decode([number], skip_special=False) for number in tokenizer.late_ends)
    is_rl = spec.algorithm.kind == "rl"
    rows, limit = ("prompts", "max_prompt_tokens") if is_rl else ("rows", "max_sample_tokens")
    split = data.split if isinstance(data, TargetDataset) else 0
    unended = data.unended if isinstance(data, TargetDataset) and tokenizer.eos_ids else 0
    doubts = {
        "lora.init: with zero, A and B are both zero and never learn": spec.lora.init == "zero"
        and spec.lora.adapter_path is None,
        "lora.target_modules: attention alone learns less than with the MLP; all-linear adapts both": {
            leaf(module) for module in adapter.modules
        }
        <= _ATTENTION,
        "model: its tokenizer names no end token; every sample will run to rollout.max_new_tokens": not (
            tokenizer.eos_ids or spec.rollout.stop
        ),
        f"model: its configuration does not name {late}, with which its "
        "tokenizer or its chat template ends turns; completions end there as well": bool(tokenizer.late_ends),
        "data.eval: not given, so nothing is evaluated (eval.every: 0 says the same)": _is_evaluated(spec)
        and not (held_out or spec.eval.sets),
        f"data: {data.dropped} {rows} are longer than data.{limit} and are left out": data.dropped > 0,
        f"data: {data.size} {rows} are fewer than data.prompts_per_step; a step sees some of them "
        "twice": data.size is not None and data.size < spec.data.prompts_per_step,
        f"data: each turn of {split} chats is a sample of its own, as the chat template renders a turn in "
        "another way once there is more": split > 0,
        f"data: {unended} turns that are trained have no end token of the model "
        f"({tokenizer.eos_ids}), so that it does not learn to end them": unended > 0,
    }
    return [text for text, holds in doubts.items() if holds]


def main() -> int:
    with contextlib.suppress(OSError):  # where memory is short, the kernel ends a check before any run
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    answers = os.dup(1)  # user code is imported here: whatever it and what it starts print goes to stderr
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr), telling(answers):
        try:
            request = msgspec.json.decode(sys.stdin.buffer.read(), type=SpecQuestion)
            plain = request.backends
            facts = preflight(
                convert(request.spec),
                cwd=Path(request.cwd),
                device=request.device,
                devices=request.devices,
                available=request.available,
                warm=request.warm,
                backends=from_plain(plain, dict[str, Backend]) if plain is not None else None,
                reference=None if request.reference is None else Path(request.reference),
                loggers=request.loggers,
                notify=request.notify,
                look=request.look,
                cluster=from_plain(request.cluster, Cluster) if request.cluster is not None else None,
                written=request.written,
            )
            answer = PreflightLine(facts=facts)
        except Exception as error:
            if isinstance(error, OSError):
                problem = f"{error.filename or 'a file'}: {error.strerror or error}"
                error = SpecError(problem, hint=_OPENED_AS)
            else:
                traceback.print_exc()
            answer = PreflightLine(error=msgspec.convert(to_wire(error), ErrorFacts))
    with open(answers, "wb") as file:
        file.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
