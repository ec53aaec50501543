"""A sweep starts a run for each point of a grid, or none; halving stops the worse ones at each rung, exactly
once.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.cli.sweeps import stopped
from lorad.daemon.context import Context
from lorad.daemon.runs.create import being_made
from lorad.daemon.runs.draws import axes_of
from lorad.daemon.runs.grid import overridden_values, points_of
from lorad.daemon.runs.sweeps import halve, halving_of
from lorad.errors import Conflict, NotFound, SpecError
from lorad.protocol.journal import EvalFact, JournalWriter
from lorad.protocol.preflight import SpecFacts
from lorad.records.requests import HalvingRequest
from lorad.records.sweeps import Halving, Rung, StartedSweep, Sweep, SweepRun
from lorad.spec.model import Spec, convert
from lorad.states import EndReason, Move
from lorad.store import runs, sweeps
from lorad.store.ingest import ingest
from tests.kit.daemon_world import SPEC, Api, behave, open_context, serving, submit, until
from tests.kit.journals import begin, evaluation, step
from tests.kit.world import SMALL, world


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("trainer.lr=1e-4,3e-4", ["1e-4", "3e-4"]),
        ("lora.target_modules=[q_proj,v_proj],[all-linear]", ["[q_proj,v_proj]", "[all-linear]"]),
        ("rollout.engine_args={a: 1, b: 2},{a: 2}", ["{a: 1, b: 2}", "{a: 2}"]),
        ('reward.pattern="a,b","c"', ['"a,b"', '"c"']),
        ("reward.pattern=a{1,2}", ["a{1,2}"]),
        ("lora.target_modules=[q_proj,v_proj]", ["[q_proj,v_proj]"]),
    ],
)
def test_commas_separate_values_unless_something_is_around_them(override: str, values: list[str]) -> None:
    assert overridden_values(override)[1] == values


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["lora.target_modules=q_proj,v_proj"], "may be one list or several values"),
        (["trainer.betas=0.9,0.99"], "may be one list or several values"),
        (["trainer.lr=1,,2"], "a value is empty"),
        (["trainer.lr=1,1"], "1 is there twice"),
        (["trainer.lr=1,2", "trainer.lr=3,4"], "given twice"),
        (["trainer.lr=1"], "nothing to sweep"),
        (["name=a,b"], "names from it"),
    ],
)
def test_a_grid_that_is_not_clear_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        axes_of(overrides)
    assert refused.value.hint


def test_every_value_meets_every_other() -> None:
    axes, rest = axes_of(["seed=1,2", "lora.rank=4", "trainer.lr=1e-4,3e-4"])
    assert rest == ["lora.rank=4"]
    assert points_of(axes)[1:3] == [["seed=1", "trainer.lr=3e-4"], ["seed=2", "trainer.lr=1e-4"]]
    with pytest.raises(SpecError, match="more than 256"):
        points_of({key: [str(n) for n in range(10)] for key in "abc"})


async def sweep(
    api: Api, *overrides: str, name: str | None = "s", spec: str = SPEC, halving: Any = None
) -> StartedSweep:
    started: StartedSweep = await api(
        "sweep", spec, source="a.yaml", cwd="/", overrides=[*overrides], name=name, halving=halving
    )
    return started


@pytest.mark.system
async def test_all_points_run_with_their_values_shown(home: Path) -> None:
    async with serving(home) as api:
        made = await sweep(api, "trainer.lr=1e-4,3e-4", "seed=1,2")
        assert made.grid == {"trainer.lr": ["1e-4", "3e-4"], "seed": ["1", "2"]}
        assert [run.name for run in made.runs] == ["s-1", "s-2", "s-3", "s-4"]
        for name in ("s-1", "s-2", "s-3", "s-4"):
            assert (await api.until(name, "ended")).reason == "completed"
        (found,) = await api("sweeps")
        assert found.runs[1].values == {"trainer.lr": 1e-4, "seed": 2}
        assert (await api("show", "s-1")).sweep == "s"
        assert len(api.ctx.pools) == 1


@pytest.mark.parametrize(
    ("overrides", "says"), [(("lora.rank=4,13",), r"s-2 \(lora.rank=13\)"), (("seed=1,x",), "seed")]
)
async def test_a_bad_point_starts_nothing(home: Path, overrides: tuple[str, ...], says: str) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match=says):
            await sweep(api, *overrides)
        assert (await api("list", all=True), await api("sweeps"), list((home / "runs").iterdir())) == (
            [],
            [],
            [],
        )


async def test_contradictory_point_is_refused_before_start(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match=r"s-2 \(.*trainer.lr=1e-4\): trainer.min_lr: 0.001 is more than"):
            await sweep(api, "trainer.lr=1e-2,1e-4", "trainer.min_lr=1e-3", "trainer.schedule=cosine")
        assert await api("list", all=True) == []


async def test_a_name_that_is_taken_starts_nothing(home: Path) -> None:
    async with serving(home) as api:
        await api.run("s-2")
        with pytest.raises(Conflict, match="named s-2"):
            await sweep(api, "seed=1,2")
        assert [run.name for run in await api("list")] == ["s-2"]
        with pytest.raises(NotFound, match="no sweep t"):
            await api("sweeps", "t")


async def test_sweep_disappears_with_its_last_run(home: Path) -> None:
    async with serving(home) as api:
        await sweep(api, "seed=1,2")
        with being_made(api.ctx, ["T-1"]), pytest.raises(Conflict, match="t-1 is being made"):
            await sweep(api, "seed=1,2", name="t")
        with pytest.raises(Conflict, match="a sweep named s"):
            await sweep(api, "seed=3,4")
        for name in ("s-1", "s-2"):
            assert [found.sweep for found in await api("sweeps")] == ["s"]
            await api.until(name, "ended")
            await api("remove", name)
        assert await api("sweeps") == []


async def test_sweep_warns_of_unshared_bases(home: Path) -> None:
    async with serving(home) as api:
        made = await sweep(api, "deterministic=true,false")
        assert made.warnings == [
            "the points need 2 kinds of pools, each with a base of its own: deterministic decide that"
        ]
        assert (await sweep(api, "seed=1,2", name="t")).warnings == []


def specs(count: int = 4, **sections: Any) -> list[Spec]:
    return [convert({"trainer": {"steps": 40}} | sections)] * count


def test_rungs_are_powers_of_eta() -> None:
    assert halving_of(HalvingRequest(), specs(8), []) == Halving(2, [5, 10, 20], "reward")
    assert halving_of(HalvingRequest(eta=3), specs(9, eval={"every": 2}), []) == Halving(3, [4, 13], "eval")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (HalvingRequest(eta=1), "--eta 1"),
        (HalvingRequest(rungs=[20, 10]), "rungs 20, 10"),
        (HalvingRequest(rungs=[40]), "rungs 40"),
        (HalvingRequest(metric="accuracy"), "--metric accuracy"),
        (HalvingRequest(rungs=[5], metric="eval"), "eval.every: 10"),
        (
            HalvingRequest(rungs=[1, 20], metric="reward"),
            "rung 1: rewards up to step 1 are from before the first update",
        ),
    ],
)
def test_a_halving_that_cannot_be_is_refused(wish: HalvingRequest, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        halving_of(wish, specs(), [])


def test_no_rung_is_before_the_first_update() -> None:
    short = {"trainer": {"steps": 6}}
    assert halving_of(HalvingRequest(), specs(8, **short), []).rungs == [2, 3]
    ahead = specs(8, **short, rollout={"max_staleness": 2})
    assert halving_of(HalvingRequest(metric="reward"), ahead, []).rungs == [4]
    assert halving_of(HalvingRequest(rungs=[1]), specs(8, eval={"every": 1}), []).metric == "eval"


SCORED, LIKELY = SpecFacts(), SpecFacts(eval_scored=False, eval_likely=True)
NEITHER = SpecFacts(eval_scored=False)
SFT = {"algorithm": {"name": "sft"}}


@pytest.mark.parametrize(
    ("facts", "every", "metric"),
    [(SCORED, 1, "eval"), (LIKELY, 1, "nll"), (NEITHER, 1, "loss"), (LIKELY, 30, "loss")],
)
def test_completions_are_ranked_by_what_is_there(facts: SpecFacts, every: int, metric: str) -> None:
    found = halving_of(HalvingRequest(rungs=[5]), specs(2, **SFT, eval={"every": every}), [facts] * 2)
    assert found.metric == metric


@pytest.mark.parametrize(
    ("metric", "algorithms", "key"),
    [
        ("reward", ({"name": "sft"},) * 2, "algorithm.name"),
        ("loss", ({"name": "grpo"},) * 2, "algorithm.name"),
        (None, ({"name": "grpo"}, {"name": "sft"}), "algorithm.name"),
        (None, ({"name": "dpo"}, {"name": "dpo", "preference": {"beta": 0.5}}), "algorithm.preference"),
        ("nll", ({"name": "sft"},) * 2, "data.eval"),
        ("eval", ({"name": "sft"},) * 2, "data.eval"),
    ],
)
def test_nothing_to_rank_by_is_refused(metric: str | None, algorithms: tuple[Any, ...], key: str) -> None:
    given = [one for algorithm in algorithms for one in specs(1, algorithm=algorithm, eval={"every": 1})]
    with pytest.raises(SpecError) as refused:
        halving_of(HalvingRequest(rungs=[5], metric=metric), given, [NEITHER] * 2)
    assert refused.value.key == key and refused.value.hint


@pytest.fixture
def ctx(home: Path) -> Iterator[Context]:
    made = open_context(home)
    yield made
    made.store.close()
    made.journal.close()


def racing(ctx: Context, metric: str, rungs: list[int], count: int = 4) -> list[str]:
    """A sweep of running runs, without their drivers."""
    names = [f"s-{number}" for number in range(1, count + 1)]
    with ctx.store.write():
        sweeps.create(ctx.store, "s", owner="me", owner_uid=7, grid={}, halving=Halving(2, rungs, metric))
        for name in names:
            submit(ctx, name, eval={"every": 2})
            runs.set_fields(ctx.store, name, sweep="s")
            runs.begin_attempt(ctx.store, name, resumed_from=None)
            runs.move(ctx.store, name, Move.PLACE)
            runs.move(ctx.store, name, Move.CONFIRM)
    return names


def went(ctx: Context, name: str, rewards: list[float], evals: dict[int, float] | None = None) -> None:
    """Steps with these rewards, and evaluations, in the journal and the store."""
    path = Path(runs.get(ctx.store, name).directory) / "journal.jsonl"
    with JournalWriter(path, name, 1) as writer:
        begin(writer)
        for number, reward in enumerate(rewards, 1):
            step(writer, number, reward)
            if evals and number in evals:
                evaluation(writer, number, evals[number])
    ingest(ctx.store, name, path)


def test_a_lower_likelihood_loss_is_better(ctx: Context) -> None:
    names = racing(ctx, "nll", [2])
    for place, name in enumerate(names):
        path = Path(runs.get(ctx.store, name).directory) / "journal.jsonl"
        with JournalWriter(path, name, 1) as writer:
            begin(writer)
            step(writer, 1)
            step(writer, 2)
            writer.append("eval", 2, EvalFact(1, None, 8, 0, nll=4.0 - place))
        ingest(ctx.store, name, path)
    halve(ctx)
    assert rungs_of(ctx) == [(2, names[:1:-1], names[1::-1])]


def rungs_of(ctx: Context) -> list[Any]:
    return [(rung.step, rung.kept, rung.stopped) for rung in sweeps.get(ctx.store, "s").rungs]


def test_rung_waits_then_keeps_the_better_half(ctx: Context) -> None:
    a, b, c, d = racing(ctx, "reward", [2])
    for name, reward in ((a, 0.1), (b, 0.9), (c, 0.5)):
        went(ctx, name, [9.0, reward, 5.0])
    went(ctx, d, [0.0])
    halve(ctx)
    assert rungs_of(ctx) == []
    runs.move(ctx.store, d, Move.STOP)
    runs.move(ctx.store, d, Move.END, reason=EndReason.FAILED)
    halve(ctx)
    assert rungs_of(ctx) == [(2, [b, c], [a])]
    stopped = runs.get(ctx.store, a)
    assert (stopped.state, stopped.wanted) == ("stopping", "stop")
    assert stopped.detail == "stopped by halving at step 2: 0.1, the best had 0.9"
    assert runs.get(ctx.store, b).state == "running"


@pytest.mark.parametrize(
    ("evals", "kept"),
    [
        ((0.9, 0.5, 0.5, 0.1), 3),
        ((0.9, 0.8, 0.5, 0.5), 2),
        ((0.0, 0.0, 0.0, 0.0), 4),
        ((0.9, 0.9, 0.9, 0.1), 3),
    ],
)
def test_equals_at_the_cut_all_go_on(ctx: Context, evals: tuple[float, ...], kept: int) -> None:
    names = racing(ctx, "eval", [2])
    for name, score in zip(names, evals, strict=True):
        went(ctx, name, [0.0, 0.0], {2: score})
    halve(ctx)
    assert rungs_of(ctx) == [(2, names[:kept], names[kept:])]


def test_a_rung_is_decided_once(ctx: Context) -> None:
    names = racing(ctx, "reward", [2, 3])
    for place, name in enumerate(names):
        went(ctx, name, [0.0, place / 10])
    halve(ctx)
    halve(ctx)
    assert rungs_of(ctx) == [(2, [names[3], names[2]], [names[1], names[0]])]
    told = ctx.store.rows("SELECT data FROM events WHERE kind = 'halving'")
    assert len(told) == 1 and json.loads(told[0]["data"])["scores"][names[3]] == 0.3


def test_an_evaluation_that_is_due_is_waited_for(ctx: Context) -> None:
    a, b = racing(ctx, "eval", [2], count=2)
    went(ctx, a, [1.0, 1.0], {2: 0.2})
    went(ctx, b, [0.0, 0.0])
    halve(ctx)
    assert rungs_of(ctx) == []
    went(ctx, b, [0.0, 0.0], {2: 0.6})
    halve(ctx)
    assert rungs_of(ctx) == [(2, [b], [a])]


def test_a_decision_that_fails_half_way_stops_nobody(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    names = racing(ctx, "reward", [2])
    for place, name in enumerate(names):
        went(ctx, name, [0.0, place / 10])
    monkeypatch.setattr("lorad.daemon.runs.sweeps._in_words", lambda score: 1 / 0)
    halve(ctx)
    assert "division by zero" in ctx.loop.troubles.lines()[0]
    assert rungs_of(ctx) == [] and {runs.get(ctx.store, name).state for name in names} == {"running"}


async def test_halving_stops_runs_gracefully_and_says_why(home: Path) -> None:
    behave(home, driver={"seconds": 0.05, "rewards": {"s-1": 0.4}})
    async with serving(home) as api:
        wish = {"eta": None, "rungs": [2], "metric": "reward"}
        await sweep(api, "seed=1,2", "eval.every=0", "trainer.steps=200", halving=wish)
        (found,) = await until_decided(api)
        (kept,), (gone,) = found.rungs[0].kept, found.rungs[0].stopped
        shown = await api.until(gone, "ended")
        assert (shown.reason, shown.detail[:33]) == ("stopped", "stopped by halving at step 2: 0.4")
        assert "steps" in shown.detail.rpartition("; ")[2]
        assert (await api("show", kept)).state == "running"


async def until_decided(api: Api) -> Any:
    return await until(lambda: [row for row in sweeps.sweeps(api.ctx.store) if row.rungs])


@pytest.mark.system
def test_sweep_works_from_the_command_line() -> None:
    with world() as made:
        spec = made.spec(SMALL)
        wish = ("--halving", "--rungs", "2", "--metric", "reward", "--name", "s", "--wait")
        over = made.json("sweep", spec, "trainer.lr=0,2e-3", "trainer.steps=3", *wish)
        assert [run["state"] for run in over["runs"]] == ["ended", "ended"]
        assert [rung["step"] for rung in over["rungs"]] == [2]
        assert {run["reason"] for run in over["runs"]} <= {"completed", "stopped"}
        table = made.lorad("sweep", "--list", "s").stdout
        assert "s-1" in table and "trainer.lr" in table and "step 2" in table
        early = made.lorad("sweep", spec, "seed=1,2", "--rungs", "1", "--metric", "reward", expect=2).stderr
        assert "before the first update" in early and "Begin with step 2" in early
        assert "several values" in made.lorad("sweep", spec, "trainer.lr=1", expect=2).stderr


def test_the_table_reads_a_stop_off_its_rung() -> None:
    rung = Rung(step=2, kept=["s-2"], stopped=["s-1"], scores={"s-1": 0.1, "s-2": 0.9})
    run = SweepRun(name="s-1", state="ended", reason="stopped", detail="in other words")
    assert stopped(Sweep("s", rungs=[rung]), run) == "stopped by halving at step 2: 0.1, the best had 0.9"
    assert stopped(Sweep("s"), run) == "in other words"
    assert stopped(Sweep("s", rungs=[rung]), replace(run, reason="completed")) == ""


# -- ASHA ---------------------------------------------------------------------------------------------------
def asha(ctx: Context, rungs: list[int], count: int = 4) -> list[str]:
    names = racing(ctx, "reward", rungs, count)
    with ctx.store.write() as connection:
        halving = json.dumps({"eta": 2, "rungs": rungs, "metric": "reward", "asha": True})
        connection.execute("UPDATE sweeps SET halving = ?", (halving,))
    return names


def test_asha_decides_as_runs_come_to_a_rung(ctx: Context) -> None:
    a, b, c, d = asha(ctx, [2, 4])
    went(ctx, b, [0.0, 0.5])
    halve(ctx)
    assert rungs_of(ctx) == [(2, [b], [])]  # the first continues, and nobody is waited for
    went(ctx, a, [0.0, 0.1])
    halve(ctx)
    assert rungs_of(ctx) == [(2, [b], [a])]
    assert runs.get(ctx.store, a).detail == "stopped by halving at step 2: 0.1, the best had 0.5"
    for name, reward in ((c, 0.7), (d, 0.6)):
        went(ctx, name, [0.0, reward])
    halve(ctx)
    assert rungs_of(ctx) == [(2, [c, d], [a, b])]  # b was kept once, and is no more among the best half
    halve(ctx)
    assert len(ctx.store.rows("SELECT 1 FROM events WHERE kind = 'halving'")) == 3


def test_asha_judges_a_run_by_its_last_rung(ctx: Context) -> None:
    a, b, *_ = asha(ctx, [2, 4])
    went(ctx, a, [0.0, 0.1, 0.9, 0.9])
    went(ctx, b, [0.0, 0.5])
    halve(ctx)
    assert rungs_of(ctx) == [(2, [a, b], []), (4, [a], [])]


def test_asha_spares_equals_and_drops_the_failed(ctx: Context) -> None:
    a, b, c, d = asha(ctx, [2])
    for name in (a, b, c):
        went(ctx, name, [0.0, 0.5])
    runs.move(ctx.store, c, Move.STOP)
    runs.move(ctx.store, c, Move.END, reason=EndReason.FAILED)
    halve(ctx)
    assert rungs_of(ctx) == [(2, [a, b], [])] and runs.get(ctx.store, d).state == "running"


def test_first_rung_and_factor_place_the_others() -> None:
    wish = HalvingRequest(eta=3, min_steps=4, asha=True)
    assert halving_of(wish, specs(9), []) == Halving(3, [4, 12, 36], "reward", asha=True)
    with pytest.raises(SpecError, match="--min-steps"):
        halving_of(HalvingRequest(rungs=[5], min_steps=5), specs(9), [])
