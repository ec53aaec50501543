"""The daemon as its clients see it: the API over the socket, and its own start and end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorad.adapters.directory import write_directory
from lorad.client import Client
from lorad.daemon import server
from lorad.daemon.adopt import adopt
from lorad.daemon.context import Context
from lorad.daemon.handlers.logs import read as read_log
from lorad.daemon.reconcile import reconcile
from lorad.daemon.run import answering
from lorad.errors import Conflict, DaemonUnreachable, IntegrityError, LoradError, NotAllowed, NotFound, SpecError
from lorad.paths import Home
from tests.test_reconcile import behave, open_context, until

SPEC = "{trainer: {steps: 6}, checkpoint: {every: 2}}"


class Api:
    """The client's methods, each in a thread, as the daemon lives in this process."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.client = ctx, Client(ctx.home, timeout=30)

    async def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *arguments, **options)

    async def run(self, name: str | None, *overrides: str, spec: str = SPEC) -> Any:
        return await self("run", spec, source="a.yaml", cwd="/", overrides=list(overrides), name=name)

    async def until(self, name: str, *states: str) -> Any:
        for _ in range(600):
            if (run := await self("show", name))["state"] in states:
                return run
            await asyncio.sleep(0.05)
        raise AssertionError(f"{name} is still {run['state']}")


@contextlib.asynccontextmanager
async def serving(home: Path, **config: Any) -> AsyncIterator[Api]:
    ctx = open_context(home, **config)
    adopt(ctx)
    async with answering(ctx):
        loop = asyncio.create_task(reconcile(ctx))
        try:
            yield Api(ctx)
        finally:
            ctx.close()
            await loop
    ctx.store.close()
    ctx.journal.close()


async def test_a_run_is_queued_shown_and_listed(home: Path) -> None:
    async with serving(home) as api:
        made = await api.run("a")
        assert (made["state"], made["name"], made["steps"]) == ("queued", "a", 6)
        shown = await api.until("a", "ended")
        assert (shown["reason"], shown["spec"]["trainer"]["steps"], shown["processes"]) == ("completed", 6, [])
        assert [run["name"] for run in await api("list")] == ["a"]
        assert [a["reason"] for a in shown["attempts"]] == ["completed"]


async def test_a_run_without_a_name_gets_one(home: Path) -> None:
    async with serving(home) as api:
        first, second = [(await api.run(None))["name"] for _ in range(2)]
        assert (first.count("-"), first != second) == (2, True)


async def test_a_name_is_used_once(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        with pytest.raises(Conflict, match="named a"):
            await api.run("a")


async def test_a_spec_that_the_preflight_refuses_leaves_nothing(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match="unlucky") as raised:
            await api.run("a", "lora.rank=13")
        assert raised.value.hint == "Take another."
        assert (await api("list"), list((home / "runs").iterdir())) == ([], [])


async def test_a_wrong_key_is_named_with_its_line(home: Path) -> None:
    async with serving(home) as api:
        with pytest.raises(SpecError, match=r"a.yaml:2: lora.rnk"):
            await api.run("a", spec="seed: 1\nlora: {rnk: 3}")


async def test_a_running_run_shows_its_processes(home: Path) -> None:
    behave(home, driver={"seconds": 0.2})
    async with serving(home) as api:
        await api.run("a")
        shown = await api.until("a", "running")
        pids = {process["role"]: process["pid"] for process in shown["processes"]}
        assert set(pids) == {"driver", "driver shim", "pool", "pool shim"}
        assert all(map(alive, pids.values()))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_pause_resume_stop_and_remove(home: Path) -> None:
    behave(home, driver={"seconds": 0.1})
    async with serving(home) as api:
        await api.run("a", "trainer.steps=1000")
        await api.until("a", "running")
        assert (await api("pause", "a"))["state"] == "stopping"
        paused = await api.until("a", "paused")
        assert (await api("resume", "a"))["state"] == "queued"
        await api.until("a", "running")
        with pytest.raises(Conflict, match="is running"):
            await api("remove", "a")
        await api("stop", "a")
        ended = await api.until("a", "ended")
        assert (ended["reason"], ended["step"] >= paused["step"]) == ("stopped", True)
        await api("remove", "a")
        with pytest.raises(NotFound):
            await api("show", "a")
        assert list((home / "runs").iterdir()) == []


async def test_queued_runs_pause_and_end_at_once(home: Path) -> None:
    behave(home, driver={"seconds": 30})
    async with serving(home) as api:
        for name in ("busy", "b", "c", "d"):
            await api.run(name)
        assert (await api("pause", "b"))["state"] == "paused"
        assert (await api("stop", "c"))["reason"] == "stopped"
        assert (await api("kill", "d"))["reason"] == "killed"
        assert (await api("kill", "b"))["reason"] == "killed"


async def test_resume_refuses_what_cannot_work(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        with pytest.raises(Conflict, match="6 steps") as done:
            await api("resume", "a")
        assert "--steps 12" in done.value.hint
        with pytest.raises(NotFound, match="no checkpoint at step 5") as missing:
            await api("resume", "a", step=5, steps=9)
        assert "2, 4, 6" in missing.value.hint


async def test_a_damaged_checkpoint_is_refused_with_the_one_before(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        newest = Path((await api("checkpoints", "a"))[-1]["path"])
        (newest / "more").write_text("x")
        with pytest.raises(IntegrityError, match="checkpoint at step 6") as raised:
            await api("resume", "a", steps=9)
        assert "--from 4" in raised.value.hint
        await api("resume", "a", step=4, steps=8)
        ended = await api.until("a", "ended")
        assert (ended["reason"], ended["step"], ended["attempts"][1]["resumed_from"]) == ("completed", 8, 4)


async def test_events_come_as_they_happen(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")

        def follow() -> list[str]:
            kinds = []
            for event in api.client.events(0, run="a"):
                kinds.append(event["kind"])
                if event["data"].get("state") == "ended":
                    break
            return kinds

        kinds = await asyncio.to_thread(follow)
        assert (kinds[0], kinds.count("step"), kinds[-1]) == ("state", 6, "state")


async def test_steps_samples_versions_and_logs_are_served(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        assert [step["step"] for step in await api("steps", "a", after=2)] == [3, 4, 5, 6]
        assert await api("samples", "a", step=3) == []
        assert [v["version"] for v in await api("adapters", "a")] == [1001, 1002, 1003, 1004, 1005, 1006]
        assert (await api("logs", "a", of="pool"))["size"] == 0
        with pytest.raises(NotFound, match="no step 9"):
            await api("samples", "a", step=9)


async def test_changed_samples_are_refused(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        (home / "runs" / "a" / "samples" / "000003.jsonl").write_text("{}")
        with pytest.raises(IntegrityError, match="000003"):
            await api("samples", "a", step=3)


def config(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")


async def test_export_copies_a_whole_version_into_an_empty_directory_only(home: Path) -> None:
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "ended")
        source = home / "runs" / "a" / "versions" / "001006"
        (source / "manifest.json").unlink()
        source.rmdir()
        write_directory(source, config)
        done = await api("export", "a@1006", str(home / "out"))
        assert (done["version"], (home / "out" / "adapter_config.json").read_text()) == ("a@1006", "{}")
        with pytest.raises(Conflict, match="not empty"):
            await api("export", "a@1006", str(home / "out"))
        (source / "adapter_config.json").write_text("[]")
        with pytest.raises(IntegrityError, match="changed bytes"):
            await api("export", "a", str(home / "other"))


async def test_an_idle_pool_is_stopped_on_request_and_a_busy_one_is_not(home: Path) -> None:
    behave(home, driver={"seconds": 0.2})
    async with serving(home) as api:
        await api.run("a")
        await api.until("a", "running")
        with pytest.raises(Conflict, match="busy with run a"):
            await api("stop_pool", "tiny-1")
        await api("kill", "a")
        await api.until("a", "ended")
        assert [pool["state"] for pool in await api("pools")] == ["ready"]
        await api("stop_pool", "tiny-1")
        await until(lambda: not api.ctx.pools["tiny-1"].process.is_up)
        assert await api("pools") == []


async def test_nonsense_is_answered_in_words(home: Path) -> None:
    async with serving(home) as api:
        for method, path, body, status in (
            ("GET", "/v1/nonsense", None, 404),
            ("POST", "/v1/runs", b"{", 422),
            ("POST", "/v1/runs", b'{"spec": 3}', 422),
            ("GET", "/v1/runs?all=x", None, 422),
            ("POST", "/v1/runs", b" " * (5 << 20), 413),
        ):
            answer = await asyncio.to_thread(raw, api.client, method, path, body)
            assert answer[0] == status
            assert {"kind", "message", "hint"} <= set(json.loads(answer[1])["error"])


def raw(client: Client, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    from lorad.client import _UnixConnection

    connection = _UnixConnection(client.home.socket, 20)
    with contextlib.suppress(BrokenPipeError):
        connection.request(method, path, body)
    response = connection.getresponse()
    result = response.status, response.read()
    connection.close()
    return result


async def test_other_users_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(home) as api:
        monkeypatch.setattr(server, "peer_uid", lambda request: 54321)
        with pytest.raises(NotAllowed, match="54321"):
            await api("status")


async def test_only_the_owner_can_reach_the_socket(home: Path) -> None:
    async with serving(home):
        assert [stat.S_IMODE(os.stat(path).st_mode) for path in (home / "lorad.sock", home)] == [0o600, 0o700]


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(home: Path) -> None:
    path = home / "x.sock"
    server.bind(path).close()
    with server.bind(path) as living:
        living.listen()
        with pytest.raises(Conflict):
            server.bind(path)


def test_a_log_is_read_from_the_end_and_cuts_no_character(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("aé" * 3)
    assert read_log(tmp_path / "log", -3, 100) == {"text": "aé", "offset": 9, "size": 9}
    assert read_log(tmp_path / "log", 0, 2) == {"text": "a", "offset": 1, "size": 9}
    assert read_log(tmp_path / "log", 1, 2) == {"text": "é", "offset": 3, "size": 9}


def start(home: Path) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "lorad.daemon"], stdin=quiet, stdout=quiet, stderr=quiet)


def answers(home: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while True:
        try:
            return Client(Home(home)).status()
        except DaemonUnreachable:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_of_two_daemons_started_at_once_one_stays(home: Path) -> None:
    both = [start(home), start(home)]
    answers(home)
    assert wait_any(both) == LoradError.exit_code
    pid = Client(Home(home)).shutdown()["pid"]
    assert pid in [process.pid for process in both]
    assert sorted(process.wait(20) for process in both) == [0, LoradError.exit_code]
    assert not (home / "lorad.sock").exists()


def wait_any(processes: list[subprocess.Popen[bytes]]) -> int:
    deadline = time.monotonic() + 20
    while all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return next(process.returncode for process in processes if process.returncode is not None)


def test_a_daemon_starts_again_after_kill_9(home: Path) -> None:
    first = start(home)
    before = answers(home)["pid"]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = start(home)
    assert answers(home)["pid"] == second.pid != before
    second.terminate()
    assert second.wait(20) == 0


def test_an_idle_daemon_uses_less_than_one_percent_of_a_core(home: Path) -> None:
    process = start(home)
    answers(home)
    before, began = cpu_ticks(process.pid), time.monotonic()
    time.sleep(4)
    used = (cpu_ticks(process.pid) - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    process.terminate()
    process.wait(20)
    assert used < 0.01


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
