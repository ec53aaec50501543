"""The gateway as a process: started by the daemon, adopted, started again, and alive without the daemon."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.box.config import GatewaySettings, Supervision
from lorad.box.paths import AttemptDir, Home
from lorad.daemon import health, reconcile
from lorad.daemon.process.processes import attempts_under, read_status, write_json
from lorad.daemon.process.sharing import SharedBox
from lorad.daemon.process.users import Caller
from lorad.daemon.services import gateway
from lorad.daemon.services.gateway import GATEWAY, gateway_socket
from lorad.daemon.services.service import KEPT, OWN, not_before, process_of, put_away, stop
from lorad.daemon.services.table import keep_services
from lorad.store import runs
from tests.kit.daemon_world import open_context, reconciling, serving, submit, until
from tests.kit.gateway_kit import openai
from tests.kit.world import world

ME = Caller(os.getuid(), "me")


def pid_of_gateway(home: Path) -> int | None:
    """None of one that is being started."""
    return (read_status(list(attempts_under(Home(home).gateway))[-1]) or {}).get("pid")


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is something to serve."""
    monkeypatch.setattr(gateway, "is_anything_served", lambda store: True)


async def test_a_home_that_serves_nothing_has_no_gateway(home: Path) -> None:
    async with serving(home) as api:
        assert (await api("status")).gateway is None
        assert not list(attempts_under(api.ctx.home.gateway))


async def test_a_served_base_wants_a_gateway(home: Path) -> None:
    ctx = open_context(home)
    submit(ctx, "a")
    assert GATEWAY.look(ctx) == {OWN: "stays"}
    runs.set_fields(ctx.store, "a", serving=1)
    assert GATEWAY.look(ctx) == {OWN: "up"}


async def test_gateway_outlives_daemon_unless_asked_to_end(home: Path, wanted: None) -> None:
    async with serving(home) as api:
        await until(lambda: gateway_socket(api.ctx, ME))
        assert (await api("status")).gateway == str(Home(home).gateway_socket)
        pid = pid_of_gateway(home) or 0
    async with serving(home) as api:
        assert gateway_socket(api.ctx, ME) and pid_of_gateway(home) == pid
        await api("shutdown", gateway=True)
        await until(lambda: not is_alive(pid))


async def test_the_port_is_told_while_it_serves(home: Path, wanted: None) -> None:
    async with serving(home) as api:
        await until(lambda: gateway_socket(api.ctx, ME))
        Home(home).gateway_port.write_text("8123")  # as the real one does
        told = await api("status")
        assert (told.url, told.key_file) == ("http://127.0.0.1:8123/v1", str(Home(home).gateway_key))
        assert (await api("shutdown", gateway=True)).gateway
        await until(lambda: gateway_socket(api.ctx, ME) is None)
        assert (await api("status")).url is None


async def test_a_shared_daemon_chooses_no_port(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = open_context(home)
    ctx.users = SharedBox()
    monkeypatch.setattr(gateway, "gateway_socket", lambda ctx, caller: "/gateway.sock")
    Home(home).gateway.mkdir()
    Home(home).gateway_port.write_text("8080")  # of a time before it was shared
    assert gateway.gateway_address(ctx, ME) == {"gateway": "/gateway.sock", "url": None, "key_file": None}
    ctx.config = msgspec.structs.replace(ctx.config, gateway=GatewaySettings(8000, home / "tokens"))
    assert gateway.gateway_address(ctx, ME)["url"] == "http://127.0.0.1:8000/v1"
    ctx.store.close()
    ctx.journal.close()


async def test_gateway_ends_with_the_last_pool(home: Path, wanted: None) -> None:
    async with serving(home) as api:
        await until(lambda: gateway_socket(api.ctx, ME))
        pid = pid_of_gateway(home) or 0
        assert (await api("shutdown", pools=True)).gateway
        await until(lambda: not is_alive(pid))


async def test_starting_gateway_is_stopped_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = open_context(home)
    monkeypatch.setattr(gateway, "is_anything_served", lambda store: True)
    keep_services(ctx)  # its shim has said nothing yet
    assert await stop(ctx, GATEWAY)
    pid = pid_of_gateway(home) or 0
    await until(lambda: pid and not is_alive(pid))
    ctx.store.close()
    ctx.journal.close()


async def test_closing_daemon_starts_nothing_more(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(reconcile, "PASS", (lambda ctx: ctx.close(), lambda ctx: started.append("gateway")))
    ctx = open_context(home)
    await reconcile.reconcile(ctx)
    assert not started
    ctx.store.close()
    ctx.journal.close()


async def test_a_gateway_that_dies_is_started_again(home: Path, wanted: None) -> None:
    async with reconciling(home) as ctx:
        await until(lambda: gateway_socket(ctx, ME))
        pid = pid_of_gateway(home) or 0
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pid_of_gateway(home) not in (None, pid) and gateway_socket(ctx, ME))


async def test_a_gateway_that_is_stopped_is_replaced(
    home: Path, wanted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    async with serving(home, supervision=Supervision(hang=2.0)) as api:
        await until(lambda: gateway_socket(api.ctx, ME) and api.ctx.processes.pulses)
        pid = pid_of_gateway(home) or 0
        os.kill(pid, signal.SIGSTOP)
        await until(
            lambda: (
                not is_alive(pid) and pid_of_gateway(home) not in (None, pid) and gateway_socket(api.ctx, ME)
            )
        )


async def test_a_gateway_that_nobody_needs_any_more_ends(home: Path, wanted: None) -> None:
    async with reconciling(home) as ctx:
        await until(lambda: gateway_socket(ctx, ME))
        pid = pid_of_gateway(home) or 0
        put_away(ctx, process_of(ctx, GATEWAY))
        await until(lambda: not is_alive(pid))


async def test_owner_gateway_lives_while_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = open_context(home)
    ctx.users = SharedBox()
    submit(ctx, "a")
    assert GATEWAY.look(ctx) == {OWN: "stays"}
    gateway.want_gateway_of(ctx, 4001)
    runs.set_fields(ctx.store, "a", serving=1)
    assert GATEWAY.look(ctx) == {OWN: "up", 4001: "up", os.getuid(): "up"}
    monkeypatch.setattr(gateway, "UNWANTED_SECONDS", -1.0)
    assert GATEWAY.look(ctx) == {OWN: "up", 4001: "away", os.getuid(): "up"}


async def test_other_settings_start_it_again(home: Path, tmp_path: Path, wanted: None) -> None:
    async with reconciling(home) as ctx:
        await until(lambda: gateway_socket(ctx, ME))
        pid = pid_of_gateway(home)
    async with reconciling(home, gateway=GatewaySettings(8080, tmp_path / "tokens")) as ctx:
        await until(lambda: pid_of_gateway(home) not in (None, pid) and gateway_socket(ctx, ME))


def life(root: Path, number: int, began: float, seconds: float) -> AttemptDir:
    attempt = AttemptDir(root / f"{number:04d}")
    attempt.root.mkdir(parents=True)
    unknown = dict.fromkeys(("shim_pid", "shim_start_time", "pid", "start_time", "exit_code", "signal"))
    write_json(attempt.status, {**unknown, "boot_id": "", "started_at": began, "ended_at": began + seconds})
    return attempt


def test_short_lives_lengthen_the_pause(tmp_path: Path) -> None:
    lives = [life(tmp_path, 1, 0.0, 500.0), *(life(tmp_path, n, 600.0 + n, 0.5) for n in range(2, KEPT))]
    pauses = [
        not_before(lives[:n]) - (read_status(lives[n - 1]) or {})["ended_at"]
        for n in range(1, len(lives) + 1)
    ]
    assert pauses == [0.0, 0.5, 1.0, 2.0]


def test_future_end_does_not_delay_the_gateway(tmp_path: Path) -> None:
    days_ahead = life(tmp_path, 1, time.time() + 2 * 86400, 0.5)
    assert not_before([days_ahead]) <= time.time()


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.long
def test_serving_survives_loss_of_daemon_and_pool() -> None:
    with world() as made:
        made.run("a", "trainer.steps=2")
        versions = [f"a@{version.version}" for version in made.client.adapters("a")]
        made.lorad("swap", "bot", versions[-1])
        made.until(lambda: made.client.status().gateway, "the gateway answers")
        asked: dict[str, Any] = {"model": "bot", "prompt": "7 3 1", "temperature": 0, "max_tokens": 12}
        with openai(made.home) as client:
            before = client.completions.create(**asked)
            assert before.system_fingerprint == f"lorad-{versions[-1]}"
            kill(made.client.pools()[0].pid or 0)
            assert (
                client.with_options(max_retries=5).completions.create(**asked).choices[0].text
                == before.choices[0].text
            )
            made.lorad("swap", "bot", versions[0])
            assert client.completions.create(**asked).system_fingerprint == f"lorad-{versions[0]}"
            kill(made.client.status().pid)
            assert client.completions.create(**asked).system_fingerprint == f"lorad-{versions[0]}"
            made.lorad("daemon", "start")
            assert made.client.status().gateway
            made.lorad("swap", "bot", "--rollback")
            assert client.completions.create(**asked).choices[0].text == before.choices[0].text


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.01)
