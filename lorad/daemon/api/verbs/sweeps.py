"""Start a run for each point of a grid, all of them or none, and list such sweeps."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from lorad.daemon.access import seen
from lorad.daemon.api.call import Call
from lorad.daemon.api.views import extend, run_view
from lorad.daemon.context import Context, Request
from lorad.daemon.pool import setup_for
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.users import User
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import anchored, being_made, create, fresh_name, make_directory, refuse_used
from lorad.daemon.runs.draws import axes_of, distributions_of, draw_points, listed_points
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
from lorad.spec.text import key_of_override, load_task
from lorad.spec.trainer import Trainer
from lorad.store import runs, sweeps
from lorad.store.db import Rows
from lorad.store.metrics import best_eval, mean_metric
from lorad.store.rows import RunRow

_UNSEEN = (  # keys of trainer that a preflight does not depend on
    *("lr", "loraplus_lr_ratio", "schedule", "schedule_steps", "warmup_steps", "min_lr", "steps"),
    *("betas", "eps", "weight_decay"),
)


class _GridPoint(NamedTuple):
    """One run that the sweep will make."""

    spec: Spec
    overrides: list[str]
    reference: Staged | None = None
    facts: SpecFacts = SpecFacts()


async def sweep(ctx: Context, call: Call) -> StartedSweep:
    """Queue a run for each point of a grid, or none. A SpecError begins with the point to blame."""
    body = call.json(SweepRequest)
    user = ctx.user(call.caller.uid)
    axes, name, points = await in_thread(ctx, call.caller.uid, _plan, fresh_name(ctx), user, body)
    _refuse_names(ctx, name, points)
    refuse_priority(ctx, call.caller, *(point.spec for point in points))
    try:
        for place, point in enumerate(points):
            with _naming_point(point):
                reference = await staged(ctx, call.caller, point.spec, body.cwd)
                points[place] = point._replace(reference=reference)
        points = await _preflight_all(ctx, points, body, call.caller.uid)
        _refuse_names(ctx, name, points)
        facts = [point.facts for point in points]
        specs = [point.spec for point in points]
        halving = None if body.halving is None else halving_of(body.halving, specs, facts)
        split = _split_pools(ctx, points, list(axes))
        with being_made(ctx, [str(spec.name) for spec in specs]):
            directories = await asyncio.to_thread(lambda: [_prepare(ctx, body, point) for point in points])
            with ctx.store.write():
                by = call.caller
                sweeps.create(ctx.store, name, owner=by.name, owner_uid=by.uid, grid=axes, halving=halving)
                for point, directory in zip(points, directories, strict=True):
                    create(ctx, point.spec, directory, by, point.facts.warnings)
                    runs.set_fields(ctx.store, str(point.spec.name), sweep=name)
    finally:
        for point in points:
            clear(point.reference)
    ctx.loop.poke()
    warnings = dict.fromkeys([*split, *(warning for fact in facts for warning in fact.warnings)])
    view = await _sweep_view(ctx, sweeps.get(ctx.store, name))
    return extend(StartedSweep, view, warnings=[*warnings])


def _plan(fresh: str, user: User | None, body: SweepRequest) -> tuple[Axes, str, list[_GridPoint]]:
    """Return what each key may be, and the sweep's name and points: `lr-1`, `lr-2`, …, with leading zeros
    where there are ten or more. Raises SpecError.
    """
    wish = body.points
    rest = body.overrides
    if wish.listed:
        axes, drawn_points = listed_points(wish.listed)
    elif wish.random is not None:
        distributions, rest = distributions_of(body.overrides)
        axes = {key: [distribution.text] for key, distribution in distributions.items()}
        drawn_points = draw_points(distributions, wish.random, wish.seed)
    else:
        axes, rest = axes_of(body.overrides)
        drawn_points = points_of(axes)
    overrides = [[*rest, *point] for point in drawn_points]
    load = partial(load_task, body.spec, source=body.source)
    name = body.name or load(overrides=overrides[0]).name or fresh
    width = len(str(len(overrides)))
    points = []
    for number, point in enumerate(overrides, 1):
        own = msgspec.json.encode(f"{name}-{number:0{width}d}").decode()
        spec = anchored(load(overrides=[*point, f"name={own}"]), Path(body.cwd), user)
        points.append(_GridPoint(spec, point))
    return axes, name, points


def _refuse_names(ctx: Context, name: str, points: list[_GridPoint]) -> None:
    """Raises Conflict when a name is in use."""
    sweeps.refuse_used(ctx.store, name)
    for point in points:
        refuse_used(ctx, point.spec)


async def _preflight_all(
    ctx: Context, points: list[_GridPoint], body: SweepRequest, uid: int
) -> list[_GridPoint]:
    """Run the preflight once for all points that need the same, and fill in the rate of each point."""
    facts_of: dict[tuple[bytes, ...], SpecFacts] = {}
    rated_points = []
    usual = {key: getattr(Trainer(), key) for key in _UNSEEN}
    for point in points:
        with _naming_point(point):
            refuse_contradictions(point.spec)
            kl = point.spec.algorithm.kl
            algorithm = point.spec.algorithm
            if algorithm.kind == "rl":
                kl = replace(kl, coef=float(algorithm.kl_coef > 0))
                algorithm = Algorithm(name=algorithm.name, kl=kl, teacher=algorithm.teacher)
            part = replace(  # the part of a spec that its preflight depends on
                point.spec,
                name=None,
                seed=0,
                algorithm=algorithm,
                trainer=replace(point.spec.trainer, **usual),
                checkpoint=Checkpoint(),
                resources=Resources(devices=point.spec.resources.devices),
                attest=Attest(tokens=point.spec.attest.tokens),
            )
            of_lora = [text for text in point.overrides if key_of_override(text).partition(".")[0] == "lora"]
            key = (to_json(part), *(text.encode() for text in (*doubts(point.spec), *of_lora)))
            if key not in facts_of:
                own = replace(body, overrides=point.overrides)
                place = point.reference and point.reference.directory
                facts_of[key] = await preflight(ctx, point.spec, body.cwd, uid, place, body=own)
            refuse_other_model(point.reference, facts_of[key])
            spec, facts = rated(point.spec, facts_of[key])
            rated_points.append(point._replace(spec=spec, facts=facts))
    return rated_points


@contextlib.contextmanager
def _naming_point(point: _GridPoint) -> Iterator[None]:
    """Name the point in what is raised within the block."""
    try:
        yield
    except LoradError as error:
        changed = " ".join(point.overrides)
        raise type(error)(f"{point.spec.name} ({changed}): {error.message}", hint=error.hint) from None


def _prepare(ctx: Context, body: SweepRequest, point: _GridPoint) -> Path:
    """Make the directory of a run that is to be, with its reference."""
    facts = point.facts
    model = facts.model_path, facts.model_dtype, facts.parameters
    reference = point.reference and point.reference.reference
    request = Request(body.cwd, body.source, point.overrides, *model, facts, reference=reference)
    directory = make_directory(ctx, point.spec, body.spec, request)
    settle(point.reference, directory)
    return directory


def _split_pools(ctx: Context, points: list[_GridPoint], keys: list[str]) -> list[str]:
    """Warn where the points need several kinds of pools."""
    kinds = set()
    for spec, _, _, facts in points:
        count = 1 if ctx.gpus.devices[0].is_cpu else min(spec.gpus, len(ctx.gpus.devices))
        setup = setup_for(
            spec,
            ctx.config,
            *ctx.gpus.devices[:count],
            model_path=facts.model_path,
            dtype=facts.model_dtype,
            threads=spec.pool.threads or 1,
            facts=facts,
        )
        kinds.add(setup.key)
    problem = f"{len(kinds)} kinds of pools, each with a base of its own"
    return [] if len(kinds) == 1 else [f"the points need {problem}: {', '.join(keys)} decide that"]


async def list_sweeps(ctx: Context, call: Call) -> list[Sweep]:
    """List the sweep of that name, or all that the caller may see, newest first. Raises NotFound."""
    name = call.text("sweep")
    rows = seen(ctx, call.caller, sweeps.sweeps(ctx.store, name))
    if name is not None and not rows:
        raise sweeps.missing(name)
    return [await _sweep_view(ctx, row) for row in rows]


async def _sweep_view(ctx: Context, row: Sweep) -> Sweep:
    members = await ctx.read(_members_of, row.sweep, [*row.grid])
    return replace(row, runs=[extend(SweepRun, run_view(ctx, run), **own) for run, own in members])


def _members_of(rows: Rows, sweep: str, grid: list[str]) -> list[tuple[RunRow, dict[str, Any]]]:
    """Read the runs of a sweep, each with its values of the grid and its figures."""
    members = []
    for name in sweeps.members(rows, sweep):
        run = runs.get(rows, name)
        spec = json.loads(run.spec)
        values = {}
        for key in grid:
            value: Any = spec
            for part in key.split("."):
                if not isinstance(value, dict):  # a section that is written as a word has it for its `name`
                    value = value if part == "name" else None
                    break
                value = value.get(part)
            values[key] = value
        own: dict[str, Any] = {"values": values, "eval_best": best_eval(rows, name)}
        for metric in ("reward", "loss"):
            own[f"{metric}_mean"] = mean_metric(rows, name, 0, run.step, LAST_STEPS, metric)
        members.append((run, own))
    return members
