"""Notifications for commands: what they get, and that nothing of them is left."""

import os
import stat
import time
from pathlib import Path

import msgspec
import pytest

from lorad.errors import SpecError
from lorad.notify.deliver import deliver, refuse_unfit
from lorad.notify.outbox import message_of
from lorad.notify.table import Delivery, Message, Undelivered
from lorad.spec.notify import Notify

MESSAGE = message_of("failure", 1000.0, {"run": "a", "reason": "failed", "detail": "no $(memory)", "step": 3})


def script(directory: Path, text: str) -> str:
    path = directory / "hook"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def to(*command: str, timeout: float = 30.0) -> Delivery:
    return Delivery("0.a", Notify(command=[*command], timeout=timeout), MESSAGE)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_command_gets_arguments_json_and_variables(tmp_path: Path) -> None:
    text = 'cat > "$1.json"; echo "$2 $LORAD_EVENT $LORAD_RUN $LORAD_TEXT" > "$1.txt"'
    await deliver(to(script(tmp_path, text), str(tmp_path / "got"), "$HOME; *"))
    assert msgspec.json.decode((tmp_path / "got.json").read_bytes(), type=Message) == MESSAGE
    assert (tmp_path / "got.txt").read_text() == f"$HOME; * failure a {MESSAGE.text}\n"


async def test_command_leads_its_own_process_group(tmp_path: Path) -> None:
    await deliver(
        to(script(tmp_path, f"cut -d ' ' -f 5 /proc/$$/stat > {tmp_path}/group; echo $$ > {tmp_path}/pid"))
    )
    assert int((tmp_path / "group").read_text()) == int((tmp_path / "pid").read_text()) != os.getpgrp()


async def test_hanging_command_is_killed_with_its_descendants(tmp_path: Path) -> None:
    text = f"""trap "" TERM
setsid sh -c 'trap "" TERM; echo $$ > {tmp_path}/far; while :; do sleep 1; done' &
echo $$ > {tmp_path}/near
while :; do sleep 1; done"""
    began = time.monotonic()
    with pytest.raises(Undelivered, match="did not end within 1 s"):
        await deliver(to(script(tmp_path, text), timeout=1.0))
    pids = [int((tmp_path / name).read_text()) for name in ("near", "far")]
    assert not any(map(is_alive, pids)) and time.monotonic() - began < 20


async def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    text = f"setsid sh -c 'echo $$ > {tmp_path}/far; sleep 600' & while ! [ -s {tmp_path}/far ]; do :; done"
    await deliver(to(script(tmp_path, text)))
    assert not is_alive(int((tmp_path / "far").read_text()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit 3", "it ended with code 3"),
        ("kill -9 $$", "it was killed by SIGKILL"),
        ("exec 0<&-; exit 4", "code 4"),
    ],
)
async def test_command_that_fails_is_reported_by_its_end(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(Undelivered, match=says):
        await deliver(to(script(tmp_path, text)))


async def test_command_that_is_gone_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Undelivered, match="is no file"):
        await deliver(to(str(tmp_path / "hook")))


def test_relative_file_of_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("https://example.org/secret\n")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="key is a relative path"):
        refuse_unfit([Notify(url_file="key")], tmp_path)


def test_unfit_receivers_are_refused_by_their_place(tmp_path: Path) -> None:
    fit, key = script(tmp_path, ""), tmp_path / "key"
    key.write_text("https://example.org/secret\n")
    key.chmod(0o600)
    refuse_unfit([Notify(command=["./hook"]), Notify(url_file=str(key))], tmp_path)
    key.chmod(stat.S_IRUSR | stat.S_IROTH)
    for wrong in (
        Notify(command=["hook-that-is-nowhere"]),
        Notify(url_file=str(key)),
        Notify(command=[str(key)]),
    ):
        with pytest.raises(SpecError) as refused:
            refuse_unfit([Notify(command=[fit]), wrong], tmp_path)
        assert "notify[1]" in refused.value.message and "secret" not in refused.value.message
