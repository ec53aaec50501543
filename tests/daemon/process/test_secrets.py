"""Secrets reach the processes of a run and no other place; specs that hold some are refused."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.box.config import Config
from lorad.daemon.process import enter
from lorad.daemon.process.commands import own_secrets, secrets_of
from lorad.daemon.process.enter import OWN_SECRETS, PLACE, UNREADABLE
from lorad.daemon.process.processes import Processes
from lorad.daemon.process.users import User
from lorad.daemon.runs.preflight import answer
from lorad.errors import SpecError
from lorad.spec.text import load_spec
from tests.kit.daemon_world import COMMANDS, behave, serving

VALUE = "zx81-the-value-that-nobody-finds-4711"
TOKEN = "hf_" + "a1B2" * 8
USER = 4001


async def test_secret_appears_only_in_the_runs_environment(home: Path) -> None:
    file = home.with_name(f"{home.name}-token")
    file.write_text(f"{VALUE}\n")
    file.chmod(0o600)
    (home / "config.yaml").write_text(f"secrets: {{MY_TOKEN: {file}}}\n")
    behave(home, driver={"seconds": 0.3})
    async with serving(home, secrets={"MY_TOKEN": file}) as api:
        api.ctx.processes = Processes(COMMANDS)  # what is forked has the environment of its parent in /proc
        await api.run("a")
        shown = await api.until("a", "running")
        assert {process.role for process in shown.processes} >= {"driver", "pool"}
        for process in (process for process in shown.processes if process.role in ("driver", "pool")):
            assert f"MY_TOKEN={VALUE}" in environment(process.pid)
        assert not any(VALUE in line for line in command_lines())
        told = [
            await api("show", "a"),
            await api("list", all=True),
            await api("logs", "a"),
            await api("pools"),
        ]
        assert VALUE not in repr(told)
        await api.until("a", "ended")
    assert [str(path) for path in files_below(home) if VALUE.encode() in path.read_bytes()] == []
    file.unlink()


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def files_below(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "lorad.db" for path in found)
    assert any(path.name == "command.json" for path in found)
    return found


def command_lines() -> Iterator[str]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                yield Path(entry.path, "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_secret_readable_by_others_is_refused_unquoted(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(VALUE)
    file.chmod(mode)
    with pytest.raises(SpecError, match=r"secrets of config.yaml: MY_TOKEN: .*token: others") as error:
        secrets_of(Config(secrets={"MY_TOKEN": file}), None)
    assert VALUE not in str(error.value) + error.value.hint


@pytest.mark.parametrize("kind", ["missing", "empty", "pipe", "directory", "somebody else's"])
def test_secret_that_is_no_own_file_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "token"
    match kind:
        case "empty":
            file.touch(0o600)
        case "pipe":
            os.mkfifo(file, 0o600)
        case "directory":
            file.mkdir(0o700)
        case "somebody else's":
            if os.getuid() != 0:
                pytest.skip("needs root, to give a file away")
            file.write_text(VALUE)
            file.chmod(0o600)
            os.chown(file, 54321, 54321)
    with pytest.raises(SpecError, match="MY_TOKEN"):
        secrets_of(Config(secrets={"MY_TOKEN": file}), None)


async def test_run_with_unreadable_secret_is_never_queued(home: Path) -> None:
    (home / "config.yaml").write_text("secrets: {MY_TOKEN: /nowhere/token}\n")
    async with serving(home) as api:
        with pytest.raises(SpecError, match="/nowhere/token"):
            await api.run("a")
        assert await api("list", all=True) == []


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("rollout: {engine_args: {api-key: x}}", []),
        ("rollout: {engine_args: {hf_token: x}}", []),
        ("trainer: {backend_args: {inner: {password: x}}}", []),
        ("rollout: {engine_args: {tokens: [" + TOKEN + "]}}", []),
        (f"# {TOKEN}\nseed: 1", []),
        ("rollout: {engine_args: {a: 'Bearer " + "x" * 30 + "'}}", []),
        ("rollout: {engine_args: {a: 'https://me:hunter22@example.org'}}", []),
        ("", [f"rollout.engine_args.a={TOKEN}"]),
        ("", ["rollout.engine_args.secret=x"]),
        ("", [f"rollout.engine_args.a=[{TOKEN}"]),
    ],
)
def test_spec_with_a_secret_is_refused_unquoted(text: str, overrides: list[str]) -> None:
    with pytest.raises(SpecError, match=r"secret") as error:
        load_spec(text, source="a.yaml", overrides=overrides)
    assert "config.yaml" in error.value.hint
    assert not any(word in str(error.value) for word in (TOKEN, "hunter22", "x" * 30))


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {engine_args: {eos_token: x, max-num-batched-tokens: 5, skip_tokenizer_init: true}}",
        "rollout: {max_new_tokens: 5, url: 'http://box:8000', key_file: /k}",
        "data: {prompt_key: q, answer_key: a}",
        "model: {path: hf_org/sk-model}",
        "trainer: {backend_args: {token: null}}",
    ],
)
def test_words_that_only_sound_secret_are_allowed(text: str) -> None:
    load_spec(text)


@pytest.fixture
def theirs() -> Iterator[Path]:
    """Make a home of another user, with a place for secrets."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it becomes another user")
    with tempfile.TemporaryDirectory(prefix="lr-") as directory:
        made = Path(directory) / PLACE
        made.mkdir(parents=True)
        for path in (made, *list(made.parents)[:3]):
            os.chown(path, USER, USER)
        yield made


def secret(directory: Path, name: str, value: str, *, mode: int = 0o600, owner: int = USER) -> None:
    file = directory / name
    file.write_text(f"{value}\n")
    file.chmod(mode)
    os.chown(file, owner, owner)


def entered(directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `env` as the user of a place for secrets."""
    home = str(directory.parents[2])
    argv = [sys.executable, "-I", "-S", enter.__file__, str(USER), str(USER), "", "/", "/usr/bin/env"]
    return subprocess.run(argv, env={"HOME": home, **env}, capture_output=True, text=True)


def test_users_process_gets_their_own_secrets(theirs: Path) -> None:
    for name in ("MY_TOKEN", "LORAD_HOME", ".swp", "a-b"):
        secret(theirs, name, VALUE)
    with_them = entered(theirs, **own_secrets(User(USER, USER, (), "eve", "/")))
    assert with_them.stdout.count(VALUE) == 1 and f"MY_TOKEN={VALUE}\n" in with_them.stdout
    assert OWN_SECRETS not in with_them.stdout
    assert VALUE not in entered(theirs, **own_secrets(None)).stdout


def test_user_without_secrets_has_none(theirs: Path) -> None:
    theirs.rmdir()
    done = entered(theirs, LORAD_OWN_SECRETS="1")
    assert done.returncode == 0 and f"HOME={theirs.parents[2]}\n" in done.stdout


@pytest.mark.parametrize("kind", ["open", "root's", "a link to root's"])
def test_secret_that_others_may_read_is_refused(theirs: Path, kind: str) -> None:
    secret(
        theirs,
        "MY_TOKEN",
        VALUE,
        mode=0o644 if kind == "open" else 0o600,
        owner=USER if kind == "open" else 0,
    )
    if kind == "a link to root's":
        (theirs / "MY_TOKEN").rename(theirs.parent / "real")
        (theirs / "MY_TOKEN").symlink_to(theirs.parent / "real")
    done = entered(theirs, LORAD_OWN_SECRETS="1")
    assert done.returncode == 1 and done.stderr.startswith(f"{UNREADABLE}{theirs}/MY_TOKEN: ")
    assert VALUE not in done.stdout + done.stderr
    with pytest.raises(SpecError, match=r"a secret cannot be read: .*MY_TOKEN") as error:
        answer(b"", done.stderr.encode())
    assert "chmod 600" in error.value.hint


def test_users_processes_get_no_secret_of_roots(tmp_path: Path) -> None:
    config = Config(secrets={"MY_TOKEN": tmp_path / "none"})
    assert secrets_of(config, User(USER, USER, (), "eve", "/")) == {OWN_SECRETS: "1"}
