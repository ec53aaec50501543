"""Start a run for each point of a grid, all of them or none, and list such sweeps."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lorad.daemon.access import seen
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import extended, run_view
from lorad.daemon.context import Context, Request
from lorad.daemon.pool import setup_for
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.users import User
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import anchored, being_made, create, fresh_name, make_directory, refuse_used
from lorad.daemon.runs.draws import axes_of, distributions_of, drawn, given
from lorad.daemon.runs.grid import Axes, points_of
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.rate import rated
from lorad.daemon.runs.reference import Staged, clear, refuse_other_model, settle, staged
from lorad.daemon.runs.sweeps import LAST_STEPS, halving_of
from lorad.errors import LoradError
from lorad.protocol.preflight import SpecFacts
from lorad.records.requests import SweepRequest
from lorad.records.sweeps import StartedSweep, Sweep, SweepRun
from lorad.rl.doubts import doubts, refuse_contradictions
from lorad.spec.algorithm import Algorithm
from lorad.spec.kept import Checkpoint
from lorad.spec.model import Attest, Resources, Spec, to_json
from lorad.spec.text import load_task, overridden
from lorad.spec.trainer import Trainer
from lorad.store import runs, sweeps
from lorad.store.db import Rows
from lorad.store.metrics import best_eval, mean_metric
from lorad.store.rows import RunRow

_UNSEEN = (
    "lr",
    "loraplus_lr_ratio",
    "schedule",
    "schedule_steps",
    "warmup_steps",
    "min_lr",
    "steps",
    "betas",
    "eps",
    "weight_decay",
)


class _GridPoint(NamedTuple):
    """One run that the sweep will make."""

    spec: Spec
    overrides: list[str]


async def sweep(ctx: Context, call: Call) -> StartedSweep:
    """Queue a run for each point of a grid.

    Raises SpecError (it begins with the point to blame), Conflict, StorageError; then nothing was made.
    """
    body = call.json(SweepRequest)
    user = ctx.user(call.caller.uid)
    axes, name, points = await in_thread(ctx, call.caller.uid, _planned, fresh_name(ctx), user, body)
    _refuse_names(ctx, name, points)
    refuse_priority(ctx, call.caller, *(point.spec for point in points))
    references: list[Staged | None] = []
    try:
        for point in points:
            with _blaming(point):
                references.append(await staged(ctx, call.caller, point.spec, body.cwd))
        points, facts = await _looked_at(ctx, points, references, body, call.caller.uid)
        _refuse_names(ctx, name, points)
        specs = [point.spec for point in points]
        halving = None if body.halving is None else halving_of(body.halving, specs, facts)
        split = _split_pools(ctx, points, facts, list(axes))
        parts = list(zip(points, facts, references, strict=True))
        with being_made(ctx, [str(point.spec.name) for point in points]):
            directories = await asyncio.to_thread(lambda: [_placed(ctx, body, *part) for part in parts])
            with ctx.store.write():
                by = call.caller
                sweeps.create(ctx.store, name, owner=by.name, owner_uid=by.uid, grid=axes, halving=halving)
                for (point, fact, _), directory in zip(parts, directories, strict=True):
                    create(ctx, point.spec, directory, call.caller, fact.warnings)
                    runs.set_fields(ctx.store, str(point.spec.name), sweep=name)
    finally:
        for reference in references:
            clear(reference)
    ctx.loop.poke()
    warnings = dict.fromkeys([*split, *(warning for fact in facts for warning in fact.warnings)])
    view = await _sweep_view(ctx, sweeps.get(ctx.store, name))
    return extended(StartedSweep, view, warnings=[*warnings])


def _planned(fresh: str, user: User | None, body: SweepRequest) -> tuple[Axes, str, list[_GridPoint]]:
    """Return what each key may be, and the sweep's name and points: `lr-1`, `lr-2`, …, with leading zeros
    where there are ten or more. Raises SpecError.
    """
    wish = body.points
    rest = body.overrides
    if wish.listed:
        axes, drawn_points = given(wish.listed)
    elif wish.random is not None:
        distributions, rest = distributions_of(body.overrides)
        axes = {key: [distribution.text] for key, distribution in distributions.items()}
        drawn_points = drawn(distributions, wish.random, wish.seed)
    else:
        axes, rest = axes_of(body.overrides)
        drawn_points = points_of(axes)
    overrides = [[*rest, *point] for point in drawn_points]
    name = body.name or _loaded(user, body, overrides[0]).name or fresh
    width = len(str(len(overrides)))
    points = []
    for number, point in enumerate(overrides, 1):
        own = msgspec.json.encode(f"{name}-{number:0{width}d}").decode()
        points.append(_GridPoint(_loaded(user, body, [*point, f"name={own}"]), point))
    return axes, name, points


def _loaded(user: User | None, body: SweepRequest, overrides: list[str]) -> Spec:
    return anchored(load_task(body.spec, source=body.source, overrides=overrides), Path(body.cwd), user)


def _refuse_names(ctx: Context, name: str, points: list[_GridPoint]) -> None:
    """Raises Conflict when a name is in use."""
    sweeps.refuse_used(ctx.store, name)
    for point in points:
        refuse_used(ctx, point.spec)


async def _looked_at(
    ctx: Context, points: list[_GridPoint], references: list[Staged | None], body: SweepRequest, uid: int
) -> tuple[list[_GridPoint], list[SpecFacts]]:
    """Run the preflight for each point, once for all points that need the same, and fill in their rates.

    Raises what the preflight raises.
    """
    facts_of: dict[tuple[bytes, ...], SpecFacts] = {}
    rated_points = []
    facts = []
    for point, reference in zip(points, references, strict=True):
        with _blaming(point):
            refuse_contradictions(point.spec)
            of_lora = [text for text in point.overrides if overridden(text).partition(".")[0] == "lora"]
            key = (_need(point.spec), *(text.encode() for text in (*doubts(point.spec), *of_lora)))
            if key not in facts_of:
                own = replace(body, overrides=point.overrides)
                place = reference and reference.directory
                facts_of[key] = await preflight(ctx, point.spec, body.cwd, uid, place, body=own)
            refuse_other_model(reference, facts_of[key])
            spec, fact = rated(point.spec, facts_of[key])
            rated_points.append(point._replace(spec=spec))
            facts.append(fact)
    return rated_points, facts


@contextlib.contextmanager
def _blaming(point: _GridPoint) -> Iterator[None]:
    """Name the point in what is raised within the block."""
    try:
        yield
    except LoradError as error:
        changed = " ".join(point.overrides)
        raise type(error)(f"{point.spec.name} ({changed}): {error.message}", hint=error.hint) from None


def _need(spec: Spec) -> bytes:
    """Make the part of a spec that the preflight depends on: points with an equal one share an answer."""
    usual = {key: getattr(Trainer(), key) for key in _UNSEEN}
    kl = spec.algorithm.kl
    algorithm = spec.algorithm
    if algorithm.kind == "rl":
        kl = replace(kl, coef=float(algorithm.kl_coef > 0))
        algorithm = Algorithm(name=algorithm.name, kl=kl, teacher=algorithm.teacher)
    return to_json(
        replace(
            spec,
            name=None,
            seed=0,
            algorithm=algorithm,
            trainer=replace(spec.trainer, **usual),
            checkpoint=Checkpoint(),
            resources=Resources(devices=spec.resources.devices),
            attest=Attest(tokens=spec.attest.tokens),
        )
    )


def _placed(
    ctx: Context, body: SweepRequest, point: _GridPoint, facts: SpecFacts, reference: Staged | None
) -> Path:
    """Make the directory of a run that is to be, with its reference."""
    model = facts.model_path, facts.model_dtype, facts.parameters
    kept = reference and reference.reference
    request = Request(body.cwd, body.source, point.overrides, *model, facts, reference=kept)
    directory = make_directory(ctx, point.spec, body.spec, request)
    settle(reference, directory)
    return directory


def _split_pools(
    ctx: Context, points: list[_GridPoint], facts: list[SpecFacts], keys: list[str]
) -> list[str]:
    """Warn when the points do not all fit into one pool: each kind of pool loads a base of its own."""
    kinds = set()
    for (spec, _), fact in zip(points, facts, strict=True):
        count = 1 if ctx.gpus.devices[0].is_cpu else min(spec.gpus, len(ctx.gpus.devices))
        setup = setup_for(
            spec,
            ctx.config,
            *ctx.gpus.devices[:count],
            model_path=fact.model_path,
            dtype=fact.model_dtype,
            threads=spec.pool.threads or 1,
            facts=fact,
        )
        kinds.add(setup.key)
    if len(kinds) == 1:
        return []
    return [
        f"the points need {len(kinds)} kinds of pools, each with a base of its own: {', '.join(keys)} "
        "decide that"
    ]


async def list_sweeps(ctx: Context, call: Call) -> list[Sweep]:
    """List the sweep of that name, or all that the caller may see, newest first.

    Raises NotFound.
    """
    name = call.text("sweep")
    rows = seen(ctx, call.caller, sweeps.sweeps(ctx.store, name))
    if name is not None and not rows:
        raise sweeps.missing(name)
    return [await _sweep_view(ctx, row) for row in rows]


class _Member(NamedTuple):
    """A run of a sweep, its values of the grid, and its figures."""

    run: RunRow
    values: dict[str, Any]
    best: float | None
    reward: float | None
    loss: float | None


async def _sweep_view(ctx: Context, row: Sweep) -> Sweep:
    members = await ctx.read(_members_of, row.sweep, [*row.grid])
    views = []
    for member in members:
        figures = {"eval_best": member.best, "reward_mean": member.reward, "loss_mean": member.loss}
        views.append(extended(SweepRun, run_view(ctx, member.run), values=member.values, **figures))
    return replace(row, runs=views)


def _members_of(rows: Rows, sweep: str, grid: list[str]) -> list[_Member]:
    """Read the runs of a sweep, up to 256, with several questions each."""

    def mean(run: RunRow, metric: str) -> float | None:
        return mean_metric(rows, run.name, 0, run.step, LAST_STEPS, metric)

    members = []
    for name in sweeps.members(rows, sweep):
        run = runs.get(rows, name)
        spec = json.loads(run.spec)
        values = {}
        for key in grid:
            value: Any = spec
            for part in key.split("."):
                if not isinstance(
                    value, dict
                ):  # the `name` of a section that is written as a word is that word
                    value = value if part == "name" else None
                    break
                value = value.get(part)
            values[key] = value
        best = best_eval(rows, run.name)
        members.append(_Member(run, values, best, mean(run, "reward"), mean(run, "loss")))
    return members
