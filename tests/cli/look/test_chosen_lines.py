"""`lorad logs` with --grep, --level and --since: lines that fit, from the whole log."""

import json
import sys
import time
from collections.abc import Iterator

import pytest

from lorad.cli.app import app
from lorad.cli.commands import logs
from lorad.client.client import Client
from lorad.client.log_lines import Sieve, wish, written_at
from lorad.errors import SpecError
from lorad.records.runs import LogPart

NOW = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))
TRACE = """2026-03-01 11:00:00,123 INFO lorad.pool.host: pool a serves
2026-03-01 11:30:00,001 WARNING lorad.engines: no sleep
2026-03-01 11:59:00,500 INFO lorad.pool.host: step 2
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    warn(loss)
ValueError: the loss is nan
2026-03-01 11:59:30,000 INFO lorad.pool.host: closed
"""


class File:
    """A log of a run that grows, served by offset as the daemon does, and the run, which ends."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.more: Iterator[str] = iter(())
        self.state = "running"

    def read(self, client: Client, run: str, *, of: str, attempt: int = 0, offset: int = 0) -> LogPart:
        size = len(self.data)
        start = max(0, size + offset) if offset < 0 else offset
        part = self.data[start : start + (1 << 20)]
        return LogPart(part.decode(), start + len(part), size)

    def show(self, client: Client, run: str) -> "File":
        more = next(self.more, None)
        self.state = "running" if more else "ended"
        self.data += (more or "").encode()
        return self


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> File:
    file = File(TRACE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(logs, "_PERIOD", 0)
    monkeypatch.setattr(Client, "logs", lambda *args, **of: file.read(*args, **of))
    monkeypatch.setattr(Client, "show", lambda *args: file.show(*args))
    monkeypatch.setattr(Client, "log_names", lambda client, run: ["driver", "pool"])
    return file


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> "Printed":
    return Printed(capsys)


class Printed:
    """What a command writes, line by line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.notes = ""

    def lines(self, *words: str) -> list[str]:
        app(["logs", "a", *words], standalone_mode=False)
        out, self.notes = self._capsys.readouterr()
        return out.splitlines()


@pytest.mark.system
def test_words_choose_lines_of_the_whole_log(log: File, shown: Printed) -> None:
    log.data = ("first nan\n" + "step\n" * 250_000 + "last NaN\n").encode()
    assert shown.lines("--grep", "nan") == ["first nan", "last NaN"]
    assert shown.lines("--grep", "nan !first") == ["last NaN"]
    assert shown.lines("--grep", "nan", "-n", "1") == ["last NaN"]
    assert shown.lines("--grep", "nan", "-n", "0") == []
    assert shown.lines("--grep", '"step nan"') == [] and "as they stand" in shown.notes


def test_a_level_keeps_tracebacks_whole(log: File, shown: Printed) -> None:
    trace = TRACE.splitlines()
    assert shown.lines("--level", "error") == trace[3:7]
    assert shown.lines("--level", "warning") == [trace[1], *trace[3:7]]
    assert shown.lines("--level", "debug") == trace


def test_lines_without_time_have_the_one_before(log: File, shown: Printed) -> None:
    assert shown.lines("--since", "5m") == TRACE.splitlines()[2:]
    assert shown.lines("--since", "5m", "--level", "info", "--grep", "closed") == TRACE.splitlines()[-1:]


def test_a_log_without_times_is_told(log: File, shown: Printed) -> None:
    log.data = b"step 1\nstep 2\n"
    with pytest.raises(SpecError, match="no line of the driver's log says when"):
        shown.lines("--since", "5m")
    assert shown.lines("--since", "5m", "--all") == [] and "pool: none of its lines" in shown.notes


def test_followed_lines_are_chosen_as_they_come(log: File, shown: Printed) -> None:
    log.data = b"nan 1\nstep\nna"
    log.more = iter(["n 2\nstep\n", "nan 3"])
    assert shown.lines("--grep", "nan", "-f") == ["nan 1", "nan 2", "nan 3"]


def test_all_logs_are_chosen_from(log: File, shown: Printed) -> None:
    log.data = b"nan 1\nstep"
    assert shown.lines("--grep", "step", "--all") == ["driver | step", "pool   | step"]
    found = json.loads("".join(shown.lines("--grep", "step", "--all", "--json")))
    assert found["pool"]["text"] == "step\n"


def test_lines_without_end_stay_bounded(log: File, shown: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_KEPT", 1000)
    log.data = b"nan " * (1 << 20)
    assert max(map(len, shown.lines("--grep", "nan"))) <= 2 << 20
    log.data = b"nan 4567\n" * 200_000
    assert len(shown.lines("--grep", "nan")) == 1000 // 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grep", ' ""'), "has no word to look for"),
        (("--level", "loud"), "there is no such level"),
        (("--since", "yesterday"), "that is no age"),
    ],
)
def test_what_is_asked_wrong_is_said(log: File, shown: Printed, words: tuple[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        shown.lines(*words)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("line", "ago"),
    [
        ("2026-03-01 11:59:00,123 INFO lorad: a", 60),
        ("[2026-03-01 11:59:00 TP0] a", 60),
        ("2026-03-01T11:59:00.5+00:00 a", 60),
        ("(APIServer pid=1) INFO 03-01 11:59:00 [api.py:1] a", 60),
        ("INFO 12-31 12:00:00 [api.py:1] a", 60 * 86400),
        ("h1: [W301 11:59:00.1 socket.cpp] a", None),
        ("h1: [W0301 11:59:00.1 socket.cpp] a", 60),
        ("INFO 13-41 12:00:00 a", None),
        ("9999-01-01 12:00:00 a", None),
        ("step 1/60 reward 0.4", None),
    ],
)
def test_times_are_read_as_programs_write_them(line: str, ago: int | None) -> None:
    at = written_at(line, NOW)
    assert (at and NOW - at) == ago


def test_hostile_words_and_lines_take_linear_time() -> None:
    pattern = "(a*)*$ !b " * 200
    line = "a" * 200_000 + "-" * 200_000 + "01-" * 100_000
    began = time.process_time()
    sieve = Sieve(wish(pattern, "error", 60.0, None, NOW))
    assert list(sieve.choose([line] * 20)) == []
    assert time.process_time() - began < 5
