"""Clients that ask all the time and remember every answer: what they saw must still hold at the end."""

import contextlib
import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from faults.kill9.box import Box
from faults.kill9.runs import Crew
from lorad.errors import DaemonUnreachable, LoradError
from lorad.protocol.journal import Record, read
from lorad.records.runs import Event, RunDetails

Key = tuple[Any, ...]
# what a move by a user says was asked
COMMANDS = {"resume": "resume", "stop": "stop", "pause": "stop", "end": "stop"}
EVENTS = "SELECT id, at, run, kind, data FROM events"


class Witness:
    """A client that remembers every answer. told: fact -> what was said of it, by (kind, run, ...)."""

    def __init__(self, box: Box, crew: Crew, chance: random.Random) -> None:
        self.box, self.crew, self.chance = box, crew, chance
        self.told: dict[Key, Any] = {}
        self.events: dict[int, Event] = {}
        self.answers = self.refusals = self.unanswered = 0
        self.closed = False
        self.pins: dict[str, set[bool]] = {}  # version -> what may be the case
        self.aliases: dict[str, set[str]] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        works = (self._ask, self._follow, self._command)
        self._threads = [threading.Thread(target=self._repeat, args=(work,), daemon=True) for work in works]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    def shut(self) -> None:
        self.closed = True
        for thread in self._threads:
            thread.join()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self.closed:
            try:
                work()
            except DaemonUnreachable:
                self.unanswered += 1
                time.sleep(0.05)
            except LoradError as error:
                self.box.wrong(f"the daemon answered {type(error).__name__}: {error}")
            time.sleep(0.1)

    # -- questions -------------------------------------------------------------------------------------------
    def _ask(self) -> None:
        for name in [*self.crew.names][-2 * len(self.crew.kinds) :]:
            self.hear(name)
            time.sleep(0.05)

    def hear(self, name: str) -> None:
        """Everything that can be asked about a run."""
        client = self.box.client
        shown = client.show(name)
        self._never_back(name, shown)
        if shown.reason == "completed":
            self.told["end", name] = "completed"
        for attempt in shown.attempts:
            ends = {"reason": attempt.reason, "exit_code": attempt.exit_code, "signal": attempt.signal}
            ended = {key: value for key, value in ends.items() if value is not None}
            self.told["attempt", name, attempt.attempt] = ended
        for step in client.steps(name):
            figures = {key: step.metrics.get(key) for key in ("reward", "loss", "grad_norm")}
            self.told["step", name, step.attempt, step.step] = {"version": step.version} | figures
        for fact in client.evals(name):
            self.told["eval", name, fact.attempt, fact.step] = {"score": fact.score}
        for version in client.adapters(name):
            about = {"sha256": version.sha256, "parent": version.parent, "step": version.step}
            self.told["version", name, version.version] = about
        for point in client.checkpoints(name):
            path = str(Path(point.path).relative_to(shown.directory))
            self.told["checkpoint", name, path] = {"version": point.version, "step": point.step}
        self.answers += 5

    def _never_back(self, name: str, shown: RunDetails) -> None:
        """An attempt's number never falls, nor does the step within one attempt."""
        now, before = (shown.attempt, shown.step), self._newest.get(name, (0, 0))
        if now[0] < before[0]:
            self.box.wrong(f"{name} was told to be in attempt {before[0]}, then in {now[0]}")
        self._newest[name] = now

    def _follow(self) -> None:
        for event in self.box.client.patient(3.0).events(max(self.events, default=0)):
            if event.kind != "idle":
                self.events[event.id] = event
            if self.closed:
                return

    # -- commands --------------------------------------------------------------------------------------------
    def _command(self) -> None:
        """Pins and aliases, one at a time: a command that was not answered may or may not have happened."""
        self._compare()
        versions = [key for key in list(self.told) if key[0] == "version" and key[2] > 0]
        if not versions:
            return
        _, run, number = self.chance.choice(versions[-6:])
        name = f"{run}@{number}"
        if self.chance.random() < 0.5:
            wanted = True not in self.pins.get(name, {False})
            method = self.box.client.pin if wanted else self.box.client.unpin
            self._do(lambda: method(name), self.pins.setdefault(name, {False}), wanted)
        else:
            alias = self.chance.choice(["bot", "judge"])
            self._do(
                lambda: self.box.client.patient(10.0).swap(alias, name),
                self.aliases.setdefault(alias, {""}),
                name,
            )
        time.sleep(self.chance.uniform(0.0, 0.5))

    def _compare(self) -> None:
        """Compare what the daemon answers now with what all commands so far should have led to."""
        pinned = {f"{v.run}@{v.version}" for v in self.box.client.adapters() if v.pinned}
        serving = {alias.alias: f"{alias.run}@{alias.version}" for alias in self.box.client.aliases()}
        for wrong in self._unlike(pinned, serving):
            self.box.wrong(wrong)

    def _unlike(self, pinned: set[str], serving: dict[str, str]) -> Iterator[str]:
        for name, possible in self.pins.items():
            if (name in pinned) not in possible:
                yield f"lost pin: {name}: may be {possible}, is {name in pinned}"
        for alias, targets in self.aliases.items():
            if serving.get(alias, "") not in targets:
                yield f"lost swap: {alias} may serve {targets}, serves {serving.get(alias, '')!r}"

    def _do(self, command: Callable[[], Any], possible: set[Any], wanted: Any) -> None:
        try:
            command()
        except DaemonUnreachable:
            possible.add(wanted)
            self.unanswered += 1
        except LoradError:
            self.refusals += 1
        else:
            possible.clear()
            possible.add(wanted)
            self.answers += 1

    # -- at the end ------------------------------------------------------------------------------------------
    def lost(self) -> Iterator[str]:
        """Yield every fact that clients saw and that journals, rows or answers no longer have."""
        yield from self._lost_facts()
        with contextlib.closing(
            sqlite3.connect(f"file:{self.box.home.database}?mode=ro", uri=True)
        ) as connection:
            yield from self._lost_events(connection)
            yield from self._lost_commands(connection)

    def _lost_facts(self) -> Iterator[str]:
        known: dict[Key, dict[str, Any]] = {}
        for name in self.crew.names:
            for record, _ in read(self.box.home.run(name).journal):
                known |= facts_of(name, record)
            for attempt in self.box.client.show(name).attempts:
                known["attempt", name, attempt.attempt] = asdict(attempt)
            known["end", name] = {"end": self.box.client.show(name).reason}
        for key, told in self.told.items():
            found = known.get(key)
            expected = {"end": told} if key[0] == "end" else told
            if found is None or any(found.get(part) != value for part, value in expected.items()):
                yield f"lost fact: {key}: told {told}, there is {found}"

    def _lost_events(self, connection: sqlite3.Connection) -> Iterator[str]:
        rows = {row[0]: row for row in connection.execute(EVENTS)}
        for number, told in self.events.items():
            row = rows.get(number)
            if row is None or (row[2], row[3], json.loads(row[4])) != (told.run, told.kind, told.data):
                yield f"lost event: {told}, there is {row}"
        state = [json.loads(row[4]) | {"run": row[2]} for row in rows.values() if row[3] == "state"]
        happened = Counter(
            (told["run"], COMMANDS.get(told.get("move"))) for told in state if told["by"] != "daemon"
        )
        for (name, command), count in Counter(key[:2] for key in set(self.crew.accepted)).items():
            if (there := happened[name, command]) < count:
                yield (
                    f"lost command: {command} of {name} was accepted {count} times and happened {there} times"
                )

    def _lost_commands(self, connection: sqlite3.Connection) -> Iterator[str]:
        pinned = {
            f"{run}@{n}"
            for run, n in connection.execute("SELECT run, version FROM versions WHERE pinned = 1")
        }
        aliases = connection.execute("SELECT alias, run, version FROM aliases")
        yield from self._unlike(pinned, {alias: f"{run}@{n}" for alias, run, n in aliases})


def facts_of(name: str, record: Record) -> dict[Key, dict[str, Any]]:
    """Return the facts of a journal record in the form in which clients see them."""
    match record.kind:
        case "step":
            return {("step", name, record.attempt, record.step): record.data | record.data["metrics"]}
        case "eval":
            return {("eval", name, record.attempt, record.step): record.data}
        case "version":
            return {("version", name, record.data["version"]): record.data | {"step": record.step}}
        case "checkpoint":
            return {("checkpoint", name, record.data["path"]): record.data | {"step": record.step}}
        case _:
            return {}
