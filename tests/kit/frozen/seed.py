"""Fills the database of the frozen world: from journals by the real ingest, by the real moves of runs and
aliases.
"""

import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Iterator

import msgspec
import pytest

from lorad.box.paths import Home, RunDir
from lorad.daemon.context import Request
from lorad.daemon.process.processes import write_json
from lorad.spec.model import convert, to_json
from lorad.states import EndReason, Move
from lorad.store import aliases, events, runs, versions
from lorad.store.db import Store
from lorad.store.ingest import ingest
from tests.kit.frozen.runs import NOW, STORIES, Story, measured, spec_of, write_files

PEOPLE = {1001: "ann", 1002: "bob"}
UIDS = {name: uid for uid, name in PEOPLE.items()}
MOVES = (  # alias, run, version, who, how long ago
    ("support", "support-v3", 60, "ann", 77000),
    ("support", "support-v3", 100, "ann", 70000),
    ("support", "support-bot", 200, "ann", 2400),
    ("canary", "support-bot", 310, "ann", 90),
    ("sorting", "sorter", 20, "ann", 300),
    ("summary-日本語", "summaries", 120, "bob", 5000),
)
PINNED = (("support-bot", 312), ("support-bot", 200), ("sorter", 20))
FINE = 128  # steps, see `fill`
GONE = ("DROP TRIGGER events_never_change", "DROP TRIGGER events_never_go")


class Clock:
    """What `time.time()` says while the world is made."""

    at = NOW

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: self.at)
            yield


def seed(home: Home, share: float = 1.0) -> None:
    """The same bytes wherever the home is, but for its path. share: of their steps that those have made that
    run.
    """
    store, clock = Store(home.database), Clock()
    store._connection.execute("PRAGMA synchronous = OFF")
    with clock.used(), store.write():
        for story in sorted((at(story, share) for story in STORIES), key=lambda story: story.at(0)):
            live(store, home, clock, story)
        serve(store, clock)
        in_order(store)
    store.close()


def at(story: Story, share: float) -> Story:
    """An earlier moment of a run."""
    if share == 1.0 or story.state != "running" or story.stride > 1:
        return story
    return dataclasses.replace(story, step=max(round(story.step * share), 1), resumed=0)


def live(store: Store, home: Home, clock: Clock, story: Story) -> None:
    """The life of a run up to NOW."""
    directory = home.run(story.name)
    write_directory(directory, story)
    clock.at = story.at(0) - 40
    spec = (directory.root / "spec.json").read_text()
    runs.create(
        store,
        name=story.name,
        owner=story.owner,
        owner_uid=UIDS.get(story.owner, 1003),
        spec_json=spec,
        directory=str(directory.root),
        steps=story.steps,
        priority=0,
    )
    runs.set_fields(store, story.name, pool=story.pool, waiting=story.waiting, origin=story.origin)
    if story.state == "queued":
        return
    clock.at += 8
    runs.move(store, story.name, Move.PLACE)
    clock.at += 3
    runs.begin_attempt(store, story.name, resumed_from=None)
    if story.state != "starting":
        clock.at += 9
        runs.move(store, story.name, Move.CONFIRM)
        ingest(store, story.name, directory.journal)
        fill(store, story)
        clock.at = NOW - story.ago + 3
        over(store, story)


def write_directory(directory: RunDir, story: Story) -> None:
    directory.root.mkdir(parents=True)
    spec = convert(spec_of(story))
    directory.spec.write_bytes(to_json(spec))
    asked = Request(
        "/home/ann/experiments", f"{story.name}.yaml", [], "/srv/models", "bfloat16", 8_190_735_360
    )
    write_json(directory.root / "request.json", msgspec.to_builtins(asked))
    directory.spec_text.write_text(json.dumps(spec_of(story), indent=1))
    for attempt in (1, 2) if story.resumed else (1,):
        changed = msgspec.structs.replace(spec, trainer=msgspec.structs.replace(spec.trainer, lr=5e-4))
        (life := directory.attempt(attempt)).root.mkdir(parents=True)
        life.spec.write_bytes(to_json(changed if attempt == 2 else spec))
    if story.step:
        write_files(story, directory)


def fill(store: Store, story: Story) -> None:
    """Add as many of a long run's steps as a chart of all of them reads."""
    chance, columns = (
        random.Random(0),
        "run, attempt, step, seq, at, version, samples, samples_sha256, metrics",
    )
    steps = range(FINE, story.step, FINE) if story.stride > 1 else ()
    rows = (
        (
            story.name,
            1,
            step,
            0,
            story.at(step),
            step // story.stride,
            "samples/none",
            "",
            msgspec.json.encode(measured(story, step, chance)).decode(),
        )
        for step in steps
    )
    with store.write() as connection:
        connection.executemany(
            f"INSERT OR IGNORE INTO steps ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
        )


def over(store: Store, story: Story) -> None:
    if story.resumed:
        runs.end_attempt(
            store, story.name, 1, exit_code=None, signal=9, reason="lost", detail="was killed by SIGKILL"
        )
    if story.state == "paused":
        runs.move(store, story.name, Move.STOP, by=story.owner)
        runs.move(store, story.name, Move.PAUSE)
    elif story.reason:
        reason = EndReason(story.reason)
        code = 0 if reason is EndReason.COMPLETED else 1
        runs.end_attempt(
            store, story.name, 1, exit_code=code, signal=None, reason=reason, detail=story.detail
        )
        runs.move(store, story.name, Move.END, reason=reason, detail=story.detail)


def serve(store: Store, clock: Clock) -> None:
    """Aliases with their moves, and pins."""
    there = {(row["run"], row["version"]) for row in store.rows("SELECT run, version FROM versions")}
    for alias, run, version, by, ago in (move for move in MOVES if move[1:3] in there):
        clock.at = NOW - ago
        aliases.move(store, alias, run, version, by=by, uid=UIDS[by])
    for run, number in sorted(there.intersection(PINNED)):
        clock.at = NOW - 60
        versions.set_pinned(store, run, number, True, by="ann")


def in_order(store: Store) -> None:
    """Events are numbered by their times, as they would have come."""
    with store.write() as connection:
        triggers = _triggers(store)
        found = store.rows("SELECT at, run, kind, data FROM events ORDER BY at, id")
        for statement in (*GONE, "DELETE FROM events", "DELETE FROM sqlite_sequence WHERE name = 'events'"):
            connection.execute(statement)
        for row in found:
            events.append(store, row["run"], row["kind"], msgspec.json.decode(row["data"]), at=row["at"])
        connection.execute("UPDATE runs SET first_event = (SELECT min(id) FROM events WHERE run = runs.name)")
        for name in triggers.keys() - _triggers(store).keys():
            connection.execute(triggers[name])


def _triggers(store: Store) -> dict[str, str]:
    rows = store.rows("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
    return {row["name"]: row["sql"] for row in rows}
