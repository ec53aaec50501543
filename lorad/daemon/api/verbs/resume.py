"""Queue a new attempt from a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lorad.adapters.directory import verify
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import extend, run_view, spec_at
from lorad.daemon.context import Context, Request, request_of, spec_of
from lorad.daemon.pools.as_owner import in_thread, on_behalf
from lorad.daemon.process.processes import write_json
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.bases import inputs_of
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.rate import rated
from lorad.daemon.runs.take_in import refuse_journal
from lorad.errors import Conflict, IntegrityError, NotFound, SpecError
from lorad.protocol.inputs import changes
from lorad.records.requests import ResumeRequest
from lorad.records.runs import Resumed
from lorad.records.versions import Checkpoint
from lorad.spec.model import Spec, to_json
from lorad.spec.text import key_of_override, merged, override
from lorad.states import EndReason, Move, RunState
from lorad.store import events, runs
from lorad.store.checkpoints import checkpoints
from lorad.store.rows import RunRow

_CHANGEABLE = frozenset(
    {"trainer", "rollout", "pool", "resources", "eval", "checkpoint", "attest", "deterministic"}
)
_ALSO = frozenset({"lora.type"})  # how a trainer fuses linears, not what the adapter is


async def resume(ctx: Context, call: Call) -> Resumed:
    """Queue a new attempt of a run that is over.

    Raises NotFound (no such checkpoint), IntegrityError (it is damaged, or the journal is another run's),
    Conflict (not over, nothing to do, or another resume came first), SpecError (an override does not fit).
    """
    body = call.json(ResumeRequest)
    run = runs.get(ctx.store, call.run)
    _refuse_what_cannot_go_on(ctx, run)
    before = spec_of(run)
    present = checkpoints(ctx.store, call.run)
    chosen = _choose(run, present, body.step)
    spec, steps = await in_thread(ctx, call.caller.uid, _plan, body, run, chosen)
    done = chosen.step if chosen else 0
    if spec.resources.priority > before.resources.priority:
        refuse_priority(ctx, call.caller, spec)
    if steps and (steps < done or (steps == done and run.reason == EndReason.COMPLETED)):
        raise Conflict(
            f"run {call.run} is to make {steps} steps, and its checkpoint has {done}",
            hint=f"Give more, as in `lorad resume {call.run} --steps {done + run.steps}`, "
            "or --from an earlier step.",
        )
    if chosen:
        await on_behalf(ctx, run.owner_uid, _check, call.run, chosen, present)
    refuse_standstill(spec, done, steps)
    changed_inputs = await on_behalf(ctx, run.owner_uid, changes, inputs_of(ctx, run))
    request = None
    if body.overrides or spec != before:
        request = request_of(run)
        reference = None if request.reference is None else run.dir.reference
        longer = replace(spec, trainer=replace(spec.trainer, steps=steps or spec.trainer.steps))
        _, facts = rated(longer, await preflight(ctx, longer, request.cwd, run.owner_uid, reference))
        request = replace(request, overrides=merged(request.overrides, body.overrides), facts=facts)
    with ctx.store.write():
        _refuse_late(ctx, run)
        detail = f"from step {' '.join([str(done), *body.overrides])}"
        runs.move(ctx.store, call.run, Move.RESUME, detail=detail, by=call.caller.name)
        runs.set_fields(ctx.store, call.run, steps=steps, resume_step=done if chosen else None)
        if request:
            _respecify(ctx, run, spec, request)
    ctx.loop.poke()
    warnings = _repeated_steps(run, spec, chosen) if body.step is None else []
    view = run_view(ctx, runs.get(ctx.store, call.run))
    warnings += request.facts.warnings if request else []
    return extend(Resumed, view, warnings=warnings, changed_inputs=changed_inputs)


def _plan(body: ResumeRequest, run: RunRow, chosen: Checkpoint | None) -> tuple[Spec, int]:
    """Return the spec of the next attempt, and how many steps the run makes in all. Raises SpecError."""
    before = spec_of(run)
    spec = change_spec(before, body.overrides)
    if chosen:
        spec = fit_lora_type(spec, body.overrides, spec_at(run.dir.attempt(chosen.attempt)))
    steps = total_steps(body, run, before)
    return keep_schedule(spec, before, run.steps, steps), steps


def _repeated_steps(run: RunRow, spec: Spec, chosen: Checkpoint | None) -> list[str]:
    """Say which steps a resume makes again, as no checkpoint has them."""
    done = chosen.step if chosen else 0
    if run.step <= done:
        return []
    where = f"its newest checkpoint is of step {done}" if chosen else "it has no checkpoint yet"
    steps = f"step {run.step} is" if run.step == done + 1 else f"steps {done + 1} to {run.step} are"
    return [f"{steps} made again: {where} (checkpoint.every is {spec.checkpoint.every})"]


def _refuse_what_cannot_go_on(ctx: Context, run: RunRow) -> None:
    """Raises Conflict for a run that is live or imported, IntegrityError for the journal of another run."""
    name = run.name
    if not RunState(run.state).is_over:
        hint = "Only a paused or ended run can be resumed."
        if run.state == RunState.STOPPING:
            takes = f", some {run.rates.step_seconds:.0f} s" if run.rates.step_seconds else ""
            hint = f"It ends its step first{takes}: `lorad wait {name}` returns then, "
            hint += "and a resume without --detach waits itself."
        raise Conflict(f"run {name} is {run.state}", hint=hint)
    if run.reason == EndReason.IMPORTED:
        message = f"{name} was imported and never trained here, so there is nothing to resume"
        fork = f"`lorad fork {name} --fresh data.train=…`"
        raise Conflict(message, hint=f"Train it on with {fork}, or with lora.adapter_path in a spec.")
    refuse_journal(ctx, run)


def change_spec(spec: Spec, overrides: Sequence[str]) -> Spec:
    """Make the spec of the next attempt; without another learning rate the run keeps its own.

    Raises SpecError for overrides that change what defines the adapter or its data.
    """
    for text in overrides:
        key = key_of_override(text)
        section = key.partition(".")[0]
        is_fixed = section in Spec.__struct_fields__ and section not in _CHANGEABLE and key not in _ALSO
        if is_fixed and override(spec, [text]) != spec:
            reason = (
                f"{key} is part of what this run is; a resume may change {', '.join(sorted(_CHANGEABLE))}"
            )
            hint = "Start a new run with it; lora.adapter_path set to an exported version continues from "
            raise SpecError(f"override {text}: {reason}", hint=f"{hint}that.")
    new = override(spec, overrides)
    if new.trainer.lr is None:
        new = replace(new, trainer=replace(new.trainer, lr=spec.trainer.lr))
    return new


def fit_lora_type(spec: Spec, overrides: Sequence[str], trained: Spec | None) -> Spec:
    """Let linears on Megatron share an A only if those of the checkpoint, made by the spec `trained`, do.

    Raises SpecError when an override asks for a shared A, and the checkpoint has none.
    """
    shared = trained is not None and trained.trainer.backend == "megatron" and trained.lora.type == "lora"
    if shared or spec.trainer.backend != "megatron" or spec.lora.type == "canonical_lora":
        return spec
    for text in overrides:
        if key_of_override(text) == "lora.type":
            why = "with it q, k and v share one A, and this run has trained one for each"
            hint = "Leave it out: canonical_lora continues with what there is."
            raise SpecError(f"override {text}: {why}", hint=hint)
    return replace(spec, lora=replace(spec.lora, type="canonical_lora"))


def keep_schedule(spec: Spec, before: Spec, horizon: int, steps: int) -> Spec:
    """Keep the horizon that a linear or cosine schedule had, unless `trainer.schedule_steps` sets another:
    more steps would stretch the schedule, and the learning rate would jump.
    """
    trainer = spec.trainer
    is_kept = trainer.schedule != "constant" and trainer.schedule == before.trainer.schedule
    if not is_kept or trainer.schedule_steps is not None or steps == horizon:
        return spec
    return replace(spec, trainer=replace(trainer, schedule_steps=horizon))


def refuse_standstill(spec: Spec, done: int, steps: int) -> None:
    """Raises SpecError when the rate has come down to 0, so that further steps would change nothing."""
    trainer = spec.trainer
    if trainer.schedule == "constant" or trainer.min_lr or not trainer.lr:
        return
    if done < (trainer.schedule_steps or steps):
        return
    raise SpecError(
        f"{trainer.schedule} ended at step {trainer.schedule_steps}, and the rate has been 0 since: "
        f"steps {done + 1} to {steps} would change nothing",
        key="trainer.schedule",
        hint=f"Choose one: trainer.min_lr={trainer.lr / 10:g} stays there; trainer.schedule_steps={steps} "
        f"stretches {trainer.schedule}, and the rate jumps up; trainer.schedule=constant goes back to "
        "trainer.lr.",
    )


def total_steps(body: ResumeRequest, run: RunRow, before: Spec) -> int:
    """Choose how many steps the run makes in all, 0 where no end is planned. Raises SpecError."""
    # overrides set trainer.steps where they make the same number of two different ones
    other = replace(before, trainer=replace(before.trainer, steps=1 + before.trainer.steps % 2))
    steps = override(before, body.overrides).trainer.steps
    asked = steps if override(other, body.overrides).trainer.steps == steps else None
    if body.steps and asked and body.steps != asked:
        raise SpecError(f"--steps {body.steps}, but trainer.steps is {asked}", hint="Give one of them.")
    return int(body.steps or asked or run.steps)


def _respecify(ctx: Context, run: RunRow, spec: Spec, request: Request) -> None:
    """Replace the spec and the request of a run, and add its new warnings."""
    resources = spec.resources
    columns = {"priority": resources.priority, "queue_group": resources.group}
    runs.set_fields(ctx.store, run.name, spec=to_json(spec).decode(), **columns)
    write_json(run.dir.root / "request.json", msgspec.to_builtins(request))
    old = {warning.get("message") for warning in events.of_kind(ctx.store, run.name, "warning")}
    for warning in request.facts.warnings:
        if warning not in old:
            events.append(ctx.store, run.name, "warning", {"message": warning})


def _refuse_late(ctx: Context, run: RunRow) -> None:
    """Raises Conflict when the run has changed while the resume was checked."""
    now = runs.get(ctx.store, run.name)
    keys = ("state", "attempt", "spec", "steps", "created_at")
    if any(getattr(now, key) != getattr(run, key) for key in keys):
        hint = f"`lorad show {run.name}` shows what it does; it can be resumed when that is over."
        message = f"run {run.name} changed while this resume was checked: it is {now.state}"
        raise Conflict(message, hint=hint)


def _choose(run: RunRow, present: list[Checkpoint], step: int | None) -> Checkpoint | None:
    """Choose the newest checkpoint, or the newest at `step`; None where the run begins from the start."""
    at_step = [row for row in present if step is None or row.step == step]
    if at_step or step is None:
        return at_step[-1] if at_step else None
    steps = ", ".join(str(row.step) for row in present) or "none"
    hint = f"There are checkpoints at: {steps}."
    raise NotFound(f"run {run.name} has no checkpoint at step {step}", hint=hint)


def _check(name: str, chosen: Checkpoint, present: list[Checkpoint]) -> None:
    """Raises IntegrityError for a damaged checkpoint; its hint names the one before."""
    try:
        verify(Path(chosen.path))
    except IntegrityError as error:
        before = [row.step for row in present if row.step < chosen.step]
        hint = "There is no checkpoint before it."
        if before:
            hint = f"Continue from the one before: `lorad resume {name} --from {before[-1]}`."
        raise IntegrityError(f"checkpoint at step {chosen.step}: {error.message}", hint=hint) from None
