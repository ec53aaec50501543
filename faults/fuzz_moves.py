"""Random lives of runs in a daemon whose processes are words: a hypothesis state machine against a plain
model.

Handlers, reconcile loop, store and journals are the real ones; only drivers and pools are a table here. So
every order of requests, deaths and restarts takes milliseconds.
"""

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lorad.adapters.directory import write_directory
from lorad.box.paths import AttemptDir
from lorad.daemon.adopt import adopt
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.control import kill, pause, remove, stop
from lorad.daemon.api.verbs.resume import resume
from lorad.daemon.context import Context
from lorad.daemon.daemon import end_tasks
from lorad.daemon.guarded import guarded
from lorad.daemon.process.processes import Processes, ProcessState
from lorad.daemon.process.users import Caller
from lorad.daemon.reconcile import PASS
from lorad.daemon.troubles import Item
from lorad.errors import Conflict, LoradError, NotFound
from lorad.protocol.journal import AttemptFact, CheckpointFact, EndFact, JournalWriter, StepFact, VersionFact
from lorad.states import MOVES, RunState
from lorad.store import events, runs
from lorad.store.check import check
from lorad.store.rows import RunRow
from tests.kit.daemon_world import open_context, submit

MEMORY = Path("/dev/shm")  # no power is lost here: fsync may cost nothing
NAMES = ("a", "b")
STEPS = 6
VERBS: dict[str, Any] = {"stop": stop, "pause": pause, "kill": kill, "resume": resume, "remove": remove}
ME = Caller(os.getuid(), "me")


class Moves(NamedTuple):
    examples: int
    moves: int


class Table(Processes):
    """Processes that are entries: they live from `start` until somebody says how they end."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[Path, ProcessState] = {}
        self.asked: dict[Path, int] = {}  # signals

    def start(
        self, attempt: AttemptDir, argv: Sequence[str], env: Mapping[str, str | None], cwd: Path, **_: Any
    ) -> None:
        assert attempt.root not in self.lives, f"{attempt.root} was started twice"
        run = attempt.root.parent.parent
        others = [root for root, state in self.lives.items() if root.parent.parent == run and state.is_up]
        assert not others, f"{attempt.root} was started while {others} lived"
        attempt.root.mkdir(parents=True, exist_ok=True)
        self.lives[attempt.root] = ProcessState("alive", 1 + len(self.lives))

    def inspect(self, attempt: AttemptDir) -> ProcessState:
        condemned = ProcessState("vanished" if attempt.status.exists() else "absent")
        return self.lives.get(attempt.root, condemned)

    def signal(self, attempt: AttemptDir, number: int) -> bool:
        self.asked[attempt.root] = number
        return self.inspect(attempt).is_up

    def kill_group(self, attempt: AttemptDir) -> bool:
        if not self.inspect(attempt).is_up:
            return False
        self.end(attempt.root, signal=signal.SIGKILL)
        return True

    def watch(self, attempt: AttemptDir) -> int | None:
        return None

    def collect(self) -> None:
        pass

    def end(self, root: Path, **how: Any) -> None:
        self.lives[root] = replace(self.lives[root], phase="exited", **how)


class Lives(RuleBasedStateMachine):
    """The model: the names of runs that must be there, with their last acknowledged step."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.home = Path(tempfile.mkdtemp(prefix="lr-", dir=MEMORY if MEMORY.is_dir() else None))
        os.environ["LORAD_HOME"] = str(self.home)
        self.table = Table()
        self.steps: dict[str, int] = {}
        self.wanted: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        async def open_it() -> Context:
            ctx = open_context(self.home)
            ctx.processes = self.table
            adopt(ctx)
            return ctx

        self.ctx = self.loop.run_until_complete(open_it())

    def end(self) -> None:
        self.ctx.close()
        self.loop.run_until_complete(end_tasks(self.ctx))
        self.ctx.store.close()
        self.ctx.journal.close()

    def teardown(self) -> None:
        report = check(self.ctx.home.database)
        self.end()
        self.loop.close()
        shutil.rmtree(self.home, ignore_errors=True)
        assert not report.problems, report.problems

    def look(self) -> None:
        """One pass of the reconcile loop."""

        async def once() -> None:
            for verb in PASS:
                guarded(self.ctx, Item(), verb)
            await asyncio.sleep(0)

        self.loop.run_until_complete(once())
        assert not self.ctx.loop.troubles, self.ctx.loop.troubles

    def ask(self, verb: str, name: str) -> bool:
        """Ask for a verb; returns whether it was done rather than refused."""
        Lives.count += 1
        request: Any = SimpleNamespace(match_info={"run": name}, query={})
        try:
            self.loop.run_until_complete(VERBS[verb](self.ctx, Call(request, ME, b"")))
        except (Conflict, NotFound):
            return False
        return True

    def driver_of(self, name: str) -> Path | None:
        """Its attempt directory, while it lives."""
        row = runs.find(self.ctx.store, name)
        root = row.dir.attempt(row.attempt).root if row else None
        return root if root in self.table.lives and self.table.lives[root].is_up else None

    @rule(name=st.sampled_from(NAMES))
    def submit(self, name: str) -> None:
        Lives.count += 1
        try:
            submit(self.ctx, name)
        except LoradError:
            assert name in self.steps, f"{name} could not be made, and there is none"
            return
        assert name not in self.steps
        self.steps[name] = 0

    @rule(verb=st.sampled_from(("stop", "pause", "kill", "resume", "remove")), name=st.sampled_from(NAMES))
    def request(self, verb: str, name: str) -> None:
        done = self.ask(verb, name)
        assert not (done and name not in self.steps), f"{verb} of a run that is not there"
        if done and verb == "remove":
            del self.steps[name]
        if done and verb in ("stop", "kill"):
            self.wanted[name] = verb
        elif done:
            self.wanted.pop(name, None)
        if done and verb == "kill":
            self.look()
            self.look()
            assert runs.get(self.ctx.store, name).state == RunState.ENDED, f"{name} lives on after a kill"

    @rule()
    def reconcile(self) -> None:
        self.look()

    @rule(name=st.sampled_from(NAMES), steps=st.integers(1, 3))
    def work(self, name: str, steps: int) -> None:
        """Its driver, if it has one, makes some steps; each is acknowledged by its journal."""
        self.look()
        if (root := self.driver_of(name)) is None:
            return
        row = runs.get(self.ctx.store, name)
        with JournalWriter(row.dir.journal, name, row.attempt) as journal:
            self.begin_attempt(journal, row, root)
            for _ in range(min(steps, row.steps - self.steps[name])):
                self.steps[name] += 1
                step_once(journal, self.steps[name], row)
        self.look()
        assert runs.get(self.ctx.store, name).step == self.steps[name], (
            "a step that was acknowledged is not there"
        )

    def begin_attempt(self, journal: JournalWriter, row: RunRow, root: Path) -> None:
        """Once: from where the daemon said."""
        begun = root / "begun"
        if begun.exists():
            return
        begun.touch()
        start = row.resume_step or 0
        journal.append("attempt", start, AttemptFact(1, row.steps, row.pool or "", "", start or None, 1))
        journal.append("rewind", start, {"to": start if start else -1})
        self.steps[row.name] = start

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(("says", "dies", "killed")))
    def driver_ends(self, name: str, how: str) -> None:
        if (root := self.driver_of(name)) is None:
            return
        row = runs.get(self.ctx.store, name)
        if how == "says":
            with JournalWriter(row.dir.journal, name, row.attempt) as journal:
                self.begin_attempt(journal, row, root)
                reason = "completed" if self.steps[name] >= row.steps else "stopped"
                journal.append("end", self.steps[name], EndFact(reason, "as it should"))
        self.table.end(
            root, **({"signal": signal.SIGKILL} if how == "killed" else {"exit_code": int(how == "dies")})
        )

    @rule()
    def pools_die(self) -> None:
        for root, state in list(self.table.lives.items()):
            if state.is_up and root.is_relative_to(self.ctx.home.pools):
                self.table.end(root, signal=signal.SIGKILL)

    @precondition(lambda self: self.steps)
    @rule()
    def daemon_restarts(self) -> None:
        Lives.count += 1
        before = self.facts()
        self.end()
        self.begin()
        assert self.facts() == before

    def facts(self) -> list[tuple[Any, ...]]:
        columns = ("name", "state", "reason", "attempt", "wanted", "step", "steps")
        return [
            tuple(getattr(row, column) for column in columns)
            for row in runs.in_states(self.ctx.store, *RunState)
        ]

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        assert {row.name for row in runs.in_states(self.ctx.store, *RunState)} == set(self.steps)
        for name, wanted in self.wanted.items():
            if name in self.steps:
                row = runs.get(self.ctx.store, name)
                assert row.state in (RunState.STOPPING, RunState.ENDED), (
                    f"{name} is {row.state} after {wanted}"
                )

    @invariant()
    def every_move_is_legal(self) -> None:
        for name in self.steps:
            state: RunState | None = None
            for event in events.after(self.ctx.store, 0, name):
                if event.kind == "state":
                    now = RunState(event.data["state"])
                    legal = state is None or any(moves.get(state) == now for moves in MOVES.values())
                    assert legal, f"{name} went from {state} to {now}"
                    state = now
            assert state == runs.get(self.ctx.store, name).state


def step_once(journal: JournalWriter, step: int, row: RunRow) -> None:
    number = 1000 * row.attempt + step
    journal.append(
        "step", step, StepFact(number, ["p"], step, f"samples/{step:06d}.jsonl", "", {"reward": 0.5})
    )
    path = f"versions/{number:06d}"
    journal.append("version", step, VersionFact(number, "0" * 64, None, path, 1, 2.0, 8, "passed", ""))
    if step % 2 == 0:
        directory = row.dir.checkpoint(step, row.attempt)
        write_directory(directory, lambda path: None)
        fact = CheckpointFact(str(directory.relative_to(row.dir.root)), number, 0)
        journal.append("checkpoint", step, fact)


def explore(seconds: float, seed: int, *, steps: int = 60, shrink: bool = False) -> Moves:
    """Lives until the time is over. Raises what the machine raises; shrink: of the shortest life that does,
    which takes minutes to find."""
    logging.getLogger("lorad.daemon").setLevel(logging.CRITICAL)
    Lives.count, examples, until = 0, 0, time.monotonic() + seconds
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    while time.monotonic() < until:
        batch = settings(
            max_examples=10, stateful_step_count=steps, deadline=None, database=None, phases=phases,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        hypothesis.seed(seed + examples)(Lives)
        run_state_machine_as_test(Lives, settings=batch)
        examples += 10
    return Moves(examples, Lives.count)
