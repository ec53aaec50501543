"""Terminals and places that have little: another encoding, no width, no home, a full or closed stdout."""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lorad.box import paths
from lorad.box.paths import default_home, give_home
from lorad.cli.app import _COMMANDS, main
from lorad.cli.output import print_json
from lorad.cli.streams import takes_all
from lorad.client.client import Client
from lorad.client.transport import Transport
from lorad.errors import StorageError
from tests.kit.frozen.world import frozen
from tests.kit.pty_kit import on_terminal
from tests.kit.warm.processes import CLIENT as WARM
from tests.kit.world import COLD, world

__all__ = ["frozen"]
MISSING = "größe-☃-漢字"
READ = {  # what a command is asked for; the others get a name that nothing has
    "list": ("--all", "--tags"), "show": ("gsm8k-32k",), "diff": ("sorter", "bold-lr"), "open": ("sorter",),
    "logs": ("sorter",), "spec": (), "adapters": ("sorter",), "checkpoints": ("bold-lr",),
    "samples": ("essays", "-n", "6"), "plot": ("sorter", "one-answer"), "metrics": ("sorter",),
    "aliases": ("--traffic",), "pools": (), "devices": (), "nodes": (), "bill": (), "top": (),
    "gc": ("--dry-run",), "groups": (), "completion": ("bash",), "replay": ("sorter",),
}  # fmt: skip


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


class Written:
    """Runs `lorad` here, before a world that stands still."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __call__(
        self, *arguments: str, encoding: str = "latin-1", kind: type = io.TextIOWrapper
    ) -> list[str]:
        """What it writes on stdout and on stderr, as bytes of the encoding."""
        streams = [kind(io.BytesIO(), encoding=encoding) for _ in range(2)]
        self._patch.setattr(sys, "argv", ["lorad", *arguments])
        self._patch.setattr(sys, "stdin", io.StringIO())
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            self._patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in range(6)
        for stream in streams:
            stream.flush()
        return [stream.buffer.getvalue().decode(encoding) for stream in streams]


@pytest.fixture
def written(frozen: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Written:
    for hook in ("on_dead", "on_wait", "on_other_version"):
        monkeypatch.setattr(Transport, hook, getattr(Transport, hook))
    monkeypatch.setenv("LORAD_HOME", str(frozen.home.root))
    monkeypatch.chdir(tmp_path)
    return Written(monkeypatch)


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_writes_in_any_encoding(command: str, written: Written) -> None:
    for encoding in ("latin-1", "ascii"):
        assert any(written(command, "--help", encoding=encoding))
        assert any(written(command, *READ.get(command, (MISSING,)), encoding=encoding))


@pytest.mark.parametrize("command", READ)
@pytest.mark.parametrize("columns", ["1", "20", "0", "-5", "wide", "2000"])
def test_every_table_fits_any_number_of_columns(
    columns: str, command: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert any(written(command, *READ[command], kind=Terminal))


def test_letters_that_an_encoding_lacks_are_escaped(written: Written) -> None:
    assert "größe-\\u2603-\\u6f22\\u5b57" in written("show", MISSING)[1]
    assert "gr\\u00f6\\u00dfe-\\u2603" in written("show", MISSING, encoding="ascii")[1]
    assert MISSING in written("show", MISSING, encoding="utf-8")[1]


def test_a_curve_is_drawn_in_ascii(written: Written) -> None:
    plain, drawn = (written("plot", "sorter", encoding=name)[0] for name in ("ascii", "utf-8"))
    assert [len(line) for line in plain.splitlines()][1:] == [len(line) for line in drawn.splitlines()][1:]
    assert plain.count("*") > 10 and "|" in plain and "\\u" not in plain


def test_json_keeps_what_is_drawn_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"größe …": ["─", "⣿", "👩 ≥"]}
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    print_json(data)
    plain.flush()
    assert json.loads(plain.buffer.getvalue()) == data


@pytest.mark.parametrize("command", ["list", "show"])
def test_json_is_the_same_in_any_encoding(command: str, written: Written) -> None:
    arguments = (command, *READ[command][:1], "--json")
    shown = [json.loads(written(*arguments, encoding=name)[0]) for name in ("utf-8", "latin-1", "ascii")]
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "~nosuch/spec.yaml"),
        ("export", "sorter@1", "~nosuch/adapter"),
        ("plot", "sorter", "--out", "~nosuch/plot.svg"),
    ],
)
def test_a_home_of_nobody_is_told(arguments: tuple[str, ...], written: Written) -> None:
    assert f"error: {arguments[-1]}: ~nosuch is no user's home" in written(*arguments)[1]


def run(command: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `lorad` is a command."""
    line = f'lorad() {{ "{sys.executable}" -m lorad "$@"; }}; {command}'
    env = os.environ | {"LORAD_HOME": str(home), "PYTHONUNBUFFERED": ""} | environment
    return subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("lorad list > /dev/full", 1, "error: lorad: No space left on device"),
        ("lorad list 2> /dev/full", 0, ""),
        ("lorad show nobody 2> /dev/full", 3, ""),
        ("lorad list >&-", 0, ""),
        ("lorad list >&- 2>&- <&-", 0, ""),
        ("lorad rm sorter <&- ", 1, "sorter is running"),
        ("lorad list | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("lorad list --all --json | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("lorad show nobody 2>&1 >&- | true; exit ${PIPESTATUS[0]}", 3, ""),
        ("lorad tui >&-", 2, "its input or output is not one"),
    ],
)
def test_a_stream_that_takes_nothing_is_told_shortly(
    command: str, code: int, says: str, frozen: Client
) -> None:
    done = run(command, frozen.home.root)
    assert (done.returncode, len(done.stderr.splitlines()) < 4) == (code, True), done.stderr
    assert says in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TERM": "dumb"}, "TERM=dumb says that this one cannot move its cursor"),
        ({"TERM": "xterm", "PYTHONIOENCODING": "latin-1"}, "its locale (iso8859-1) lacks the characters"),
    ],
)
def test_the_dashboard_refuses_a_poor_terminal(
    environment: dict[str, str], says: str, frozen: Client
) -> None:
    env = os.environ | {"LORAD_HOME": str(frozen.home.root)} | environment
    seen = on_terminal([sys.executable, "-m", "lorad", "tui"], 120, env)
    assert says in seen and "lorad top" in seen and "Traceback" not in seen


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "utf-16-le"])
def test_unicode_takes_all(encoding: str) -> None:
    assert takes_all(io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert not takes_all(io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))


@pytest.mark.system
def test_a_reward_prints_in_any_locale() -> None:
    with world(COLD) as made:
        (made.root / "lohn.py").write_text(
            "def score(completion, **_):\n    print('größe ☃')\n    return 1.0\n"
        )
        words = ("run", made.spec(), "reward=./lohn.py:score", "trainer.steps=1", "--name", "e")
        made.lorad(*words, LC_ALL="C", PYTHONIOENCODING="ascii", TERM="dumb")
        assert made.client.show("e").reason == "completed"
        assert "größe ☃" in made.lorad("logs", "e", "--of", "driver").stdout


@pytest.mark.system
def test_everything_works_in_a_strange_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A link, spaces, letters, quotes and a line break in the path, no TMPDIR and umask 077."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    place = tmp_path / "link" / "ein Ordner\nmit ü 'und' \"$x\" %s {y}"
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", None)  # where this process looked before
    before = os.umask(0o077)
    try:
        place.mkdir()
        with world(COLD, place) as made:
            (made.root / "zeilen ü.jsonl").write_text('{"prompt": "größe", "answer": "ü"}\n')
            keys = ("data.train=zeilen ü.jsonl", "data.prompts_per_step=1", "trainer.steps=1")
            made.lorad("run", made.spec(name="spec ü.yaml"), *keys, "--name", "e")
            made.python = WARM  # the daemon and what it starts stay cold
            made.lorad("resume", "e", "--steps", "2")
            made.completed("e")
            made.lorad("verify", "e")
            made.lorad("export", "e@0", "aus ü")
            made.lorad("serve", "builtin:tiny", "--adapter", "b=aus ü")
            assert made.lorad("open", "e").stdout == f"{made.home.root}/runs/e\n"
    finally:
        os.umask(before)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user who is a number, as in `docker run -u 12345` without a HOME."""
    for name in ("HOME", "LORAD_HOME", "XDG_DATA_HOME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    return monkeypatch


def test_a_user_without_a_home_is_told(nobody: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="no HOME, and none of user 3999999999 in passwd") as refused:
        default_home()
    assert "Set LORAD_HOME" in refused.value.hint
    give_home()
    assert "HOME" not in os.environ


def test_who_has_no_home_gets_that_of_lorad(nobody: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody.setenv("LORAD_HOME", str(tmp_path))
    give_home()
    assert Path.home() == tmp_path == paths.default_home()
    give_home()  # a HOME that is set stays
    assert os.environ["HOME"] == str(tmp_path)
