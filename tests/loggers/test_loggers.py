"""What `loggers` may be, how a journal becomes segments, and loggers of other packages."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lorad.box.paths import RunDir
from lorad.errors import Conflict, SpecError
from lorad.loggers import sink
from lorad.loggers.choose import LoggerChoice, refuse_unfit
from lorad.loggers.cursor import Cursor, CursorFile
from lorad.loggers.export import chosen, write_all
from lorad.loggers.follow import Follower
from lorad.loggers.logger import LoggedRun, Logger, Point, Segment
from lorad.loggers.table import FollowedRun
from lorad.protocol.journal import JournalWriter
from lorad.protocol.tables import LONGEST
from tests.kit.journals import begin, end, step


class Noted(Logger):
    """Writes down how it is called."""

    calls: list[Any]

    def begin(self, segment: Segment, after: int) -> None:
        self.calls.append(("begin", segment.number, after))

    def put(self, point: Point) -> None:
        self.calls.append(point.step)

    def flush(self) -> None:
        """There is nothing to flush."""

    def close(self, reason: str = "") -> None:
        self.calls.append(("close", reason))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "r")
    directory.root.mkdir()
    return directory


def life(directory: RunDir, attempt: int, resumed: int | None, *steps: int, reason: str = "") -> None:
    with JournalWriter(directory.journal, "r", attempt) as writer:
        begin(writer, resumed)
        for number in steps:
            step(writer, number)
        if reason:
            end(writer, steps[-1], reason)


def follow(directory: RunDir, *, is_over: bool = False) -> list[Any]:
    """What a new life does."""
    Noted.calls = []
    logged = LoggedRun("r", 1.0, directory.root)
    file = CursorFile(directory.loggers / "noted.json")
    follower = Follower(directory.journal, lambda: Noted(logged, None), file)
    try:
        follower.catch_up(is_over=is_over)
    finally:
        follower.drop()
    return [call for call in Noted.calls if call != ("close", "")]


def refused(*loggers: Any) -> SpecError:
    with pytest.raises(SpecError) as error:
        refuse_unfit([*loggers])
    return error.value


def test_life_begins_with_the_last_step(run: RunDir) -> None:
    life(run, 1, None, 1, 2, 3)
    assert follow(run) == [("begin", 0, -1), 1, 2, 3]
    assert follow(run) == [("begin", 0, 2), 3]


def test_rewind_begins_another_segment(run: RunDir) -> None:
    life(run, 1, None, 1, 2, 3)
    life(run, 2, 1, 2)
    assert follow(run) == [("begin", 0, -1), 1, 2, 3, ("close", "superseded"), ("begin", 1, 1), 2]


def test_resume_without_loss_continues_the_segment(run: RunDir) -> None:
    life(run, 1, None, 1, 2, reason="stopped")
    assert follow(run) == [("begin", 0, -1), 1, 2, ("close", "stopped")]
    life(run, 2, 2, 3, reason="completed")
    assert follow(run) == [("begin", 0, 1), 2, 3, ("close", "completed")]


def test_what_is_done_is_not_opened_again(run: RunDir) -> None:
    life(run, 1, None, 1, 2)
    follow(run, is_over=True)
    assert follow(run, is_over=True) == []


def test_cut_journal_is_written_again(run: RunDir) -> None:
    life(run, 1, None, 1, 2, 3)
    follow(run)
    whole = run.journal.read_bytes()
    run.journal.write_bytes(whole[: len(whole) - 400])
    assert follow(run)[0] == ("begin", 0, -1)


def test_damaged_cursor_is_the_beginning(run: RunDir) -> None:
    life(run, 1, None, 1, 2)
    follow(run)
    (run.loggers / "noted.json").write_text("{")
    assert follow(run) == [("begin", 0, -1), 1, 2]


def test_points_that_were_not_flushed_come_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    life(run, 1, None, 1, 2, 3)
    with monkeypatch.context() as broken:
        broken.setattr(Noted, "flush", lambda self: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            follow(run)
    assert follow(run) == [("begin", 0, -1), 1, 2, 3]


def test_two_processes_never_write_with_one_cursor(run: RunDir) -> None:
    first = CursorFile(run.loggers / "a.json")
    first.hold()
    with pytest.raises(Conflict, match="another process"):
        CursorFile(run.loggers / "a.json").hold()
    first.release()
    CursorFile(run.loggers / "a.json").hold()


def test_unknown_logger_is_refused_by_key() -> None:
    error = refused("tensorboard", "tensorbord")
    assert (error.path, "tensorboard" in error.hint) == ("loggers[1]", True)


def test_logger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refused("tensorboard")
    assert "not installed" in error.problem and "lorad[tensorboard]" in error.hint


@pytest.mark.parametrize(
    ("logger", "says"),
    [
        ({"tensorboard": {"folder": "x"}}, "unknown field"),
        ({"mlflow": {}}, "uri"),
        ({"mlflow": {"uri": "sqlite:///ml.db"}}, "uri has a relative path"),
        ({"tensorboard": {"dir": "tb"}}, "tb is a relative path"),
        ({"wandb": {"mode": "offline", "dir": "wb"}}, "wb is a relative path"),
        ({"wandb": {"key_file": "key"}}, "key is a relative path"),
        ({"wandb": {}}, "key_file is missing"),
        ({"wandb": {"key_file": "/nowhere/key"}}, "No such file"),
        ({"a": {}, "b": {}}, "one name with its settings"),
    ],
)
def test_unfit_settings_are_refused(logger: Any, says: str) -> None:
    assert says in refused(logger).message


def test_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret-of-the-user\n")
    key.chmod(0o640)
    error = refused({"wandb": {"key_file": str(key)}})
    assert "readable by others" in error.problem and f"chmod 600 {key}" in error.hint
    assert "s3cret" not in error.message + error.hint
    key.chmod(0o600)
    refuse_unfit([{"wandb": {"key_file": str(key)}}])


def test_other_packages_bring_loggers(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "mine-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[lorad.loggers]\nnoted = mine_noted:Noted\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine_noted", sys.modules[__name__])
    Noted.calls = []
    life(run, 1, None, 1, reason="completed")
    write_all(run, chosen("noted", None, {}), tmp_path)
    assert Noted.calls == [("begin", 0, -1), 1, ("close", "completed")]


def test_writing_all_twice_is_the_same(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    life(run, 1, None, 1, 2, 3, reason="completed")
    choice = chosen("tensorboard", str(tmp_path / "tb"), {})
    for _ in range(2):
        write_all(run, choice, tmp_path)
        (file,) = (tmp_path / "tb" / "r").glob("*.lorad")
    assert file.name == "events.out.tfevents.0000000000.lorad"
    assert CursorFile(run.loggers / f"{choice.id}.json").load() != Cursor()


def test_earlier_run_of_the_name_is_left_alone(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    choice = LoggerChoice("tensorboard", {"dir": str(tmp_path / "tb")})
    for _ in range(2):
        life(run, 1, None, 1, reason="completed")
        write_all(run, choice, tmp_path)
        run.journal.unlink()
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == ["r", "r~1"]


def test_tensorboard_shows_samples_as_text(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    life(run, 1, None, 1, 2, reason="completed")
    (run.root / "samples").mkdir()
    said = {"prompt": "S:21=", "completion": "# <b>no\n`markup`", "reward": 0.5, "answer": "12"}
    (run.root / "samples" / "2").write_text("".join(json.dumps(said) + "\n" for _ in range(3)) + '{"to')
    choice = LoggerChoice("tensorboard", {"dir": str(tmp_path / "tb"), "samples": 2})
    write_all(run, choice, tmp_path)
    found = EventAccumulator(str(tmp_path / "tb" / "r"))
    found.Reload()
    assert sorted(found.Tags()["tensors"]) == ["samples/1", "samples/2"]
    (shown,) = found.Tensors("samples/1")
    (text,) = shown.tensor_proto.string_val
    assert shown.step == 2 and b"reward 0.5" in text and b"    # <b>no\n    `markup`" in text
    write_all(run, LoggerChoice("tensorboard", {"dir": str(tmp_path / "none")}), tmp_path)
    assert "samples/1" not in EventAccumulator(str(tmp_path / "none" / "r")).Reload().Tags()["tensors"]


def test_fault_is_short_whatever_servers_say(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer one made the state of the process unreadable, and hid the faults of all others."""
    life(run, 1, None, 1)

    def answers(*_: object) -> Logger:
        raise RuntimeError("x" * 100_000)

    monkeypatch.setattr(sink, "make", answers)
    one = sink.Sink(LoggerChoice("tensorboard", {}), run.root)
    one.follow([FollowedRun("r", str(run.root), [], is_over=False)])
    deadline = time.monotonic() + 30.0
    while not (faults := one.faults) and time.monotonic() < deadline:
        time.sleep(0.01)
    one.stop()
    one.join(10.0)
    assert [len(fault.says) for fault in faults] == [LONGEST]
