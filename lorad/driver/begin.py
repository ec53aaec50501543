"""The beginning of an attempt: open the slot, fresh or from a checkpoint, publish and evaluate."""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lorad.backends.setup import adapter_config
from lorad.driver import checkpoint, pending
from lorad.driver.ahead import Ahead
from lorad.driver.attempt.checkpoints import STATE, chosen_checkpoint
from lorad.driver.attempt.pool import is_same_base, newest_version, open_of, sizes_of
from lorad.driver.evals import progress
from lorad.driver.evals.evaluate import evaluate, evaluation_due
from lorad.driver.publish import publish
from lorad.driver.sampling.row_counts import row_counts
from lorad.driver.session import Session, State
from lorad.driver.supervised import LINEAR, held_out_likelihood
from lorad.driver.train import policy_loss
from lorad.errors import Conflict
from lorad.files import expanded
from lorad.models.facts import read_facts
from lorad.protocol.batch import GIVEN_RATIO, VALUE_LOSS
from lorad.protocol.calls import CRITIC, LoadVersion, Nothing, OpenCritic, Opened
from lorad.protocol.inputs import HASHED_BYTES, Input, look
from lorad.protocol.journal import AttemptFact, Placed, Record, Reference, lineage, read
from lorad.protocol.status import PoolInfo
from lorad.rl.data import name_of
from lorad.rl.generated.environment import described
from lorad.rl.streaming.pinned import commits
from lorad.spec.data import names_of

_FACTS = ("step", "version", "eval")
_OF_MODEL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)


def begin(session: Session) -> PoolInfo:
    """Open the slot, attest the current version, and journal `attempt` (and `rewind`).

    Where sampling is to run ahead, the caller enters `session.ahead`.
    """
    info: PoolInfo = session.pool.call("hello", Nothing())
    refuse_unknown_loss(session, info)
    is_exact = info.engine == "builtin" and info.device == "cpu"
    deterministic = session.spec.deterministic
    session.plays_freely = not (is_exact if deterministic is None else deterministic)
    session.records_routes = records_routes(session, info)
    records = [r for r, _ in read(session.run_dir.journal)]
    facts = lineage(records)
    compare_with_before(session, info, records)
    reference_base = _compare_with_teacher(session, info, records)
    compare_with_reference(session.params.reference, reference_base, sizes_of(session.spec.trainer))
    inputs = _keep_inputs(session, Path(info.model_path))
    _compare_inputs(session, records, inputs)
    restored = None
    if (path := chosen_checkpoint(session.run_dir, session.params, facts)) is not None:
        state = msgspec.json.decode((path / STATE).read_bytes(), type=State)
        restored = checkpoint.Restored(path, state)
    if restored and restored.state.stream and session.train_data.stream is not None:
        session.train_data.stream.restore(restored.state.stream)
    rollouts = pending.read(session, restored.path, facts) if restored else []
    opened = _open_slot(session, info, restored)  # the pool says how far it is
    session.tokens_per_microbatch = opened.tokens_per_microbatch
    _journal(session, info, restored, opened, inputs, again=any(r.kind in _FACTS for r in records))
    for field in State.__struct_fields__:
        setattr(session.state, field, getattr(restored.state if restored else State(), field))
    session.reference = restored.reference if restored else None
    progress.restore(session, facts if restored else [], session.state.step)
    if restored is None and session.spec.algorithm.has_critic and _critic_before(session, None):
        session.state.critic_steps = session.spec.algorithm.critic.warmup_steps
    session.state.next_version = max(
        1 + newest_version(session.run_dir, records), session.params.first_version
    )
    publish(session, session.state.step)
    if restored is None and evaluation_due(session):
        evaluate(session, *(held_out_likelihood(session) or ()))
    if session.spec.rollout.max_staleness:
        session.ahead = Ahead(session, rollouts)
    return info


def refuse_unknown_loss(session: Session, info: PoolInfo) -> None:
    """Raise Conflict when the pool's trainer lacks a term of the loss: a warm pool of an older lorad."""
    algorithm = session.spec.algorithm
    loss = policy_loss(session.spec) if algorithm.kind == "rl" else LINEAR
    needs = loss.needs + (VALUE_LOSS,) * algorithm.has_critic
    plays = any(judged.hosts is not None for judged in session.judged)
    needs += (GIVEN_RATIO,) * (loss.ratio != "token" and plays)
    if missing := [term for term in needs if term not in info.losses]:
        raise Conflict(
            f"pool {info.pool} does not know {', '.join(missing)}, which this run's loss needs",
            hint=f"`lorad pools stop {info.pool}` ends it; `lorad resume {session.params.run}` starts one "
            "that does.",
        )


def records_routes(session: Session, info: PoolInfo) -> bool:
    """Return whether the samples of the run have routes. Raises Conflict where they must and cannot."""
    setting = session.spec.rollout.routes
    is_due = setting == "record" or (setting == "auto" and info.dtype == "bfloat16")
    if session.spec.algorithm.kind != "rl" or not info.experts or not is_due:
        return False
    lacks = f"{info.engine} and {info.trainer} in pool {info.pool} do not record and replay routes"
    if not info.routes and setting == "record":
        hint = f"`lorad pools stop {info.pool}` ends one of an older lorad; else leave rollout.routes out."
        raise Conflict(f"{lacks}, which rollout.routes: record asks for", hint=hint)
    if not info.routes:
        session.warn(f"{lacks}: experts may differ between rollout and training, which bfloat16 makes likely")
    elif setting == "auto":
        print("rollout.routes is record: the base is a mixture of experts in bfloat16", flush=True)
    return info.routes


def _open_slot(session: Session, info: PoolInfo, restored: checkpoint.Restored | None) -> Opened:
    spec = session.spec
    params = session.params
    model = read_facts(Path(info.model_path))
    kl = params.reference
    name = f"{params.run}@reference"
    reference = LoadVersion(name, kl.directory, kl.sha256) if kl else None
    if restored is not None and restored.reference is not None:
        reference = LoadVersion(name, str(restored.reference), restored.state.reference_sha256)
    critic = None
    if spec.algorithm.has_critic:  # as the checkpoint has it; a new one is shaped like the policy's adapter
        adapter = adapter_config(spec, model)
        rank = spec.algorithm.critic.rank or adapter.rank
        of_experts = max(1, adapter.rank_of_experts * rank // adapter.rank)
        alpha = adapter.alpha * rank / adapter.rank
        critic = OpenCritic(rank, alpha, _critic_before(session, restored), of_experts)
    request = replace(
        open_of(spec, model, Path(params.cwd)),
        resume_from=str(restored.path) if restored else params.start_from,
        kept=spec.rollout.max_staleness + 2,
        critic=critic,
        reference=reference,
        has_teacher=spec.algorithm.teacher is not None,
        step=restored.state.step if restored else 0,
    )
    opened: Opened = session.pool.call("open", request)
    if "auto" in (spec.trainer.tokens_per_microbatch, spec.trainer.activation_checkpointing):
        how = "recomputed" if opened.activation_checkpointing else "kept"
        if opened.kept_tokens:
            how = f"kept, and recomputed for more than {opened.kept_tokens}"
        print(
            f"micro-batches have {opened.tokens_per_microbatch} tokens, whose activations are {how}",
            flush=True,
        )
    return opened


def _critic_before(session: Session, restored: checkpoint.Restored | None) -> str | None:
    """Return the directory of the critic in the checkpoint; None where there is none."""
    start = str(restored.path) if restored else session.params.start_from
    before = Path(start) / CRITIC if start else None
    return str(before) if before is not None and before.is_dir() else None


def compare_with_before(session: Session, info: PoolInfo, records: list[Record]) -> None:
    """Warn where the data differ from the attempt before.

    Raises Conflict for another base, as an adapter belongs to one, and for a streamed file with other
    content, in which the place is worth nothing.
    """
    own = [r.data for r in reversed(records) if r.kind == "attempt"]
    attempts: Sequence[Mapping[str, Any]] = own or session.params.bases
    if not attempts:
        return
    same = is_same_base(attempts, info, sizes_of(session.spec.trainer))
    if same is None:
        session.warn(
            f"nothing shows whether the weights of {info.model} are still those of the attempts before"
        )
    elif not same:
        trained = "this run" if own else session.params.origin
        hint = "Put the model back, or start a new run with lora.adapter_path set to an exported version."
        raise Conflict(f"the weights of {info.model} are not those that {trained} was trained on", hint=hint)
    if own and own[0]["data_sha256"] != session.train_data.digest:
        source = session.spec.data.train
        previous = own[0].get("inputs", {}).get("data.train")
        if session.train_data.stream is not None and previous is not None and isinstance(source, str):
            path = str(Path(session.params.cwd) / expanded(source))
            if path == previous["path"]:  # else another file was asked for
                raise Conflict(
                    f"data.train: {path} is not what it was in the attempt before, and it is streamed",
                    hint="Put the file back, or name another: "
                    f"`lorad resume {session.params.run} data.train=FILE`.",
                )
        session.warn(f"{name_of(source)} is not what it was in the attempt before: other batches will come")
    if own and own[0].get("products", "") != info.products and not session.plays_freely:
        session.warn(
            "products are computed in other forms than in the attempt before (another CPU, torch or number "
            "of threads): the weights will differ in rounding"
        )


def _compare_with_teacher(session: Session, info: PoolInfo, records: Sequence[Record]) -> PoolInfo:
    """Return the base of the reference: the pool's model, or its teacher where the run has one.

    Raises Conflict when the pool has no teacher, or one with other weights than in the attempt before.
    """
    teacher = session.spec.algorithm.teacher
    if teacher is None:
        return info
    run = session.params.run
    if not info.teacher_sha256:
        hint = f"`lorad pools stop {info.pool}` ends it; `lorad resume {run}` starts one that does."
        raise Conflict(f"pool {info.pool} does not hold {teacher}, algorithm.teacher", hint=hint)
    before = next((r.data.get("teacher_sha256") for r in reversed(records) if r.kind == "attempt"), None)
    if before and before != info.teacher_sha256:
        problem = f"the weights of {teacher}, algorithm.teacher, are not those of the attempts before"
        raise Conflict(problem, hint="Put the model back, or start a new run with it.")
    return replace(info, model=teacher, model_sha256=info.teacher_sha256, base_checksum="")


def compare_with_reference(reference: Reference | None, info: PoolInfo, sizes: Mapping[str, int]) -> None:
    """Raise Conflict where the reference is a version of a run on other weights."""
    if reference is not None and is_same_base(reference.bases, info, sizes) is False:
        raise Conflict(
            f"the weights of {info.model} are not those that {reference.name}, algorithm.kl.reference, was "
            "trained on",
            hint="Put the model back, or start a new run with another reference.",
        )


def _journal(
    session: Session,
    info: PoolInfo,
    restored: checkpoint.Restored | None,
    opened: Opened,
    inputs: dict[str, Input],
    *,
    again: bool,
) -> None:
    """Write down what the attempt begins with, and on which nodes.

    again: there were facts before, of which only the ones that led to `restored` count from now on.
    """
    resumed_from = restored.state.step if restored else None
    kl = session.params.reference
    begun = AttemptFact(
        pid=os.getpid(),
        steps=session.params.steps,
        pool=info.pool,
        base_checksum=info.base_checksum,
        resumed_from=resumed_from,
        parameters=opened.parameters,
        data_sha256=session.train_data.digest,
        model_sha256=info.model_sha256,
        base_parameters=info.parameters,
        trainer=info.trainer,
        engine=info.engine,
        sizes=sizes_of(session.spec.trainer),
        inputs=inputs,
        reference=kl and replace(kl, bases=[], attested=opened.reference.verdict if opened.reference else ""),
        teacher_sha256=info.teacher_sha256 if session.spec.algorithm.teacher else "",
        commits=commits(session.spec),
        software=info.versions,
        routes="record" if session.records_routes else "off",
        rows=row_counts(session),
        products=info.products,
    )
    session.journal.append("attempt", resumed_from or 0, begun)
    if again:
        to = -1 if resumed_from is None else resumed_from
        session.journal.append("rewind", session.state.step, {"to": to})
    if info.nodes:
        session.journal.append("placed", resumed_from or 0, Placed(info.nodes, session.spec.trainer.ranks))


def _keep_inputs(session: Session, model: Path) -> dict[str, Input]:
    """Describe each input file by its key of the spec or `model: file`, and keep the text of user code."""
    inputs: dict[str, Input] = {}
    code = {key: (file, source) for key, file, source in session.rewarder.files}
    for (side, label), judged in session.of_sources.items():
        code |= {f"{side}.{label}.{one.key}": (one.file, one.source) for one in judged.rewarder.files}
        if judged.hosts is not None and (file := judged.hosts.training.file) is not None:
            code[f"{side}.{label}.env.name"] = (file, judged.hosts.training.source)
    for problems in session.problems:
        own = problems.rewarder.files if problems.rewarder else []
        code |= {f"eval.sets.{problems.name}.{one.key}": (one.file, one.source) for one in own}
    code |= {function.key: (function.file, function.source) for function in session.own.all}
    if session.hosts is not None and (file := session.hosts.training.file) is not None:
        code["env.name"] = (file, session.hosts.training.source)
    for key, (file, source) in code.items():
        kept = f"{key.removeprefix('algorithm.').removesuffix('.name')}.py"  # reward.py, loss.py
        (session.run_dir.attempt(session.params.attempt).work / kept).write_bytes(source)
        mtime = file.stat().st_mtime_ns if file.exists() else 0
        inputs[key] = Input(str(file), len(source), mtime, hashlib.sha256(source).hexdigest())
    configured = {"data.train": session.spec.data.train, "data.eval": session.spec.data.eval}
    data = {
        key if isinstance(sources, str) else f"{key}: {name}": name
        for key, sources in configured.items()
        for name in names_of(sources)
    }
    data |= {f"eval.sets.{name}.data": one.data for name, one in session.spec.eval.sets.items()}
    for key, name in data.items():
        with contextlib.suppress(OSError):  # a task, or of the hub
            inputs[key] = look(Path(session.params.cwd) / expanded(name), at_most=HASHED_BYTES)
    envs = {"env.name": session.spec.env}
    envs |= {f"{side}.{label}.env.name": one.spec.env for (side, label), one in session.of_sources.items()}
    for key, env in envs.items():
        if env.package:
            versions = described(env, Path(session.params.cwd)).versions
            named = f"{env.name} ({', '.join(f'{name} {version}' for name, version in versions.items())})"
            inputs[key] = Input(named, 0, 0, hashlib.sha256(named.encode()).hexdigest())
    for name in _OF_MODEL if not session.spec.model.path.startswith("builtin:") else ():
        with contextlib.suppress(OSError):
            inputs[f"model: {name}"] = look(model / name)
    return inputs


def _compare_inputs(session: Session, records: Sequence[Record], now: Mapping[str, Input]) -> None:
    """Warn of every file whose text changed; data to train on are compared by their rows."""
    before = next((r.data for r in reversed(records) if r.kind == "attempt"), {})
    for key, old in msgspec.convert(before.get("inputs", {}), dict[str, Input]).items():
        new = now.get(key)
        if new is None or key.startswith("data.train"):
            continue
        if old.sha256 and new.sha256 != old.sha256:
            digests = f"sha256 {old.sha256[:12]}, now {new.sha256[:12]}"
            session.warn(f"{key}: {new.path} is not what it was in the attempt before ({digests})")
