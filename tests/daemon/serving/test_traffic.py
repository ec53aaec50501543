"""What is counted of requests at the gateway, and how the daemon comes to know it."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import openai as sdk
import pytest
from openai import OpenAI

from lorad.box.paths import Home
from lorad.daemon.api.metrics import exposition
from lorad.daemon.context import Context
from lorad.daemon.process.sharing import SharedBox
from lorad.daemon.services import gateway
from lorad.daemon.services.service import process_of, state_of
from lorad.daemon.serving import traffic
from lorad.errors import PoolLost
from lorad.gateway.errors import ApiError
from lorad.gateway.traffic import NAMES, RECENT, Counted, Traffic, put
from lorad.protocol.traffic import FILE, FILE_BYTES, WINDOW, Figures, Report
from lorad.records.versions import Alias
from lorad.store import runs
from tests.kit.daemon_world import finished, serving, until
from tests.kit.gateway_kit import World, entry, openai, running_gateway, write_table
from tests.kit.pool_kit import until as wait_until

pytest_plugins = ["tests.kit.gateway_fixtures"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ask(
    counted: Counted, *names: str, tokens: int = 8, clock: Clock | None = None, seconds: float = 0.0
) -> None:
    """One request that is answered whole."""
    with counted:
        counted.serves(*names)
        counted.count_tokens(tokens)
        if clock is not None:
            clock.now += seconds
        counted.is_whole = True


def is_alive(ctx: Context) -> bool:
    return state_of(ctx, process_of(ctx, gateway.GATEWAY)).phase == "alive"


def of(traffic: Traffic, name: str = "bot") -> Figures:
    return traffic.report().names[name]


def reports(world: World, name: str) -> Figures:
    """What the file of the gateway says, zeros before there is one."""
    return (found(world.home.gateway / FILE) or {}).get(name, Figures())


# -- counting ------------------------------------------------------------------------------------------------
def test_request_counts_for_alias_and_version(clock: Clock) -> None:
    traffic = Traffic(clock)
    for version, seconds in (("a@1", 1.0), ("a@2", 3.0), ("a@2", 2.0)):
        ask(Counted(traffic), "bot", version, clock=clock, seconds=seconds)
    figures = of(traffic)
    assert (figures.requests, figures.tokens, figures.p50, figures.p95) == (3, 24, 2.0, 3.0)
    assert (figures.tokens_per_second, figures.requests_per_second) == (24 / WINDOW, 3 / WINDOW)
    assert (of(traffic, "a@1").requests, of(traffic, "a@2").requests) == (1, 2)


def test_rates_cover_last_minute_counts_cover_all(clock: Clock) -> None:
    traffic = Traffic(clock)
    ask(Counted(traffic), "bot")
    clock.now += 30
    ask(Counted(traffic), "bot")
    assert of(traffic).requests_per_second == 2 / WINDOW
    clock.now += 31
    assert of(traffic).requests_per_second == 1 / WINDOW and of(traffic).p50 == 0.0
    clock.now += 1000
    assert of(traffic) == Figures(requests=2, tokens=16)
    assert traffic.is_settled


def test_the_first_token_is_timed_of_streams_only(clock: Clock) -> None:
    traffic = Traffic(clock)
    for streams in (False, True):
        with Counted(traffic, streams=streams) as counted:
            counted.serves("bot")
            clock.now += 0.5
            counted.count_tokens(1)
            clock.now += 1.5
            counted.count_tokens(1)
            counted.is_whole = True
    assert (of(traffic).ttft_p50, of(traffic).p50, of(traffic).requests) == (0.5, 2.0, 2)


@pytest.mark.parametrize(
    ("error", "requests", "failed"),
    [
        (ApiError(400, "too long"), 0, 0),
        (ApiError(503, "full"), 1, 1),
        (PoolLost("gone"), 1, 1),
        (KeyError("a defect"), 1, 1),
        (ConnectionResetError("the client left"), 1, 0),
    ],
)
def test_what_the_serving_side_broke_has_failed(
    clock: Clock, error: Exception, requests: int, failed: int
) -> None:
    traffic = Traffic(clock)
    with pytest.raises(type(error)), Counted(traffic) as counted:
        counted.serves("bot")
        assert of(traffic).in_flight == 1
        raise error
    assert of(traffic) == Figures(requests=requests, failed=failed, requests_per_second=requests / WINDOW)


def test_traffic_memory_stays_bounded(clock: Clock) -> None:
    traffic = Traffic(clock)
    with Counted(traffic) as waiting:
        waiting.serves("bot")
        for number in range(3 * NAMES):
            ask(Counted(traffic), f"a@{number}", tokens=1 << 40)
        for _ in range(3 * RECENT):
            ask(Counted(traffic), "a@0", tokens=1 << 40)
        assert len(traffic.report().names) == NAMES and of(traffic).in_flight == 1
        assert len(traffic.of("a@0").recent) == RECENT
    data = msgspec.json.encode(
        Report(0.0, {"x" * 140 + name: figure for name, figure in traffic.report().names.items()})
    )
    assert len(data) < FILE_BYTES


# -- the gateway ---------------------------------------------------------------------------------------------
def test_the_gateway_tells_what_it_served(world: World, client: OpenAI) -> None:
    before = reports(world, "bot")
    answer = client.completions.create(model="bot", prompt="1 2", max_tokens=8, n=2)
    chunks = list(client.completions.create(model="bot", prompt="1 2", max_tokens=8, stream=True))
    assert chunks and answer.usage is not None
    wait_until(lambda: reports(world, "bot").requests == before.requests + 2)
    after = reports(world, "bot")
    assert after.tokens - before.tokens >= answer.usage.completion_tokens + 1
    assert (after.in_flight, after.failed) == (0, before.failed)
    assert after.p95 and after.ttft_p50 and after.ttft_p50 <= after.p95 and after.tokens_per_second > 0
    assert reports(world, "sorter@0").requests >= 2


@pytest.mark.system
def test_abandoned_request_was_in_flight_not_failed(world: World, client: OpenAI) -> None:
    before = reports(world, "bot")
    stream = client.completions.create(
        model="bot", prompt=["1"] * 32, max_tokens=1900, n=128, temperature=2, stream=True
    )
    assert next(iter(stream)).choices
    wait_until(lambda: reports(world, "bot").in_flight == 1)
    stream.close()
    wait_until(lambda: reports(world, "bot").in_flight == 0)
    after = reports(world, "bot")
    assert (after.requests, after.failed) == (before.requests + 1, before.failed)


def test_refused_and_unknown_requests_are_not_counted(world: World, client: OpenAI) -> None:
    before = reports(world, "bot").requests
    with pytest.raises(sdk.BadRequestError):
        client.completions.create(model="bot", prompt="1", max_tokens=5000)
    with pytest.raises(sdk.NotFoundError):
        client.completions.create(model="nobody", prompt="1")
    client.completions.create(model="bot", prompt="1", max_tokens=1)
    wait_until(lambda: reports(world, "bot").requests > before)
    assert reports(world, "bot").requests == before + 1
    assert "nobody" not in json.loads((world.home.gateway / FILE).read_bytes())["names"]


def test_an_alias_that_cannot_be_served_fails(world: World) -> None:
    version = world.versions[0]
    write_table(world.home, {"cold": version.version}, {version.version: entry(*placed(world), socket=None)})
    with openai(world.home) as client, pytest.raises(sdk.InternalServerError):
        client.completions.create(model="cold", prompt="1")
    wait_until(lambda: reports(world, "cold").failed == 1)


def placed(world: World) -> tuple[Any, Path, Any]:
    return world.running, world.root, world.versions[0]


def test_a_file_that_cannot_be_written_changes_nothing(world: World, client: OpenAI) -> None:
    (blocked := world.home.gateway / f".{FILE}.tmp").unlink(missing_ok=True)
    while True:
        try:
            blocked.mkdir()
            break
        except FileExistsError:
            continue  # it is being written
    try:
        client.completions.create(model="bot", prompt="1", max_tokens=1)
        put(world.home.gateway / FILE, Report(0.0, {}))
    finally:
        blocked.rmdir()
    before = reports(world, "bot").requests
    client.completions.create(model="bot", prompt="1", max_tokens=1)
    wait_until(lambda: reports(world, "bot").requests > before)


# -- the daemon ----------------------------------------------------------------------------------------------
async def test_aliases_show_traffic_of_living_gateway(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "bot", "a@1003")
        await until(lambda: is_alive(api.ctx))
        put(api.ctx.home.gateway / FILE, Report(0.0, {"bot": Figures(requests=7)}))
        (row,) = await api("aliases")
        assert (row.traffic.requests, row.step, row.owner) == (7, 3, row.by)
        assert 'lorad_gateway_requests_total{alias="bot"} 7' in await exposition(api.ctx)


async def test_without_a_gateway_there_is_no_traffic(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "is_anything_served", lambda store: False)
    monkeypatch.setattr(gateway, "UP_SECONDS", 0.1)  # a swap waits for a gateway
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "bot", "a@1003")
        put(api.ctx.home.gateway / FILE, Report(0.0, {"bot": Figures(requests=7)}))  # of one that was killed
        assert [row.traffic for row in await api("aliases")] == [None]
        assert "lorad_gateway_requests_total{" not in await exposition(api.ctx)


def test_traffic_file_lives_with_the_gateway(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.gateway.mkdir()
    with running_gateway(home):
        assert found(home.gateway / FILE) == {}
        assert (home.gateway / FILE).stat().st_mode & 0o777 == 0o600
    assert not (home.gateway / FILE).exists()


FIGURES = b'{"since": 1, "names": {"bot": {"requests": 7}}}'


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 99999, b" " * (FILE_BYTES + 1), FIGURES.replace(b"7", b"-7")]
)
def test_what_is_no_traffic_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(FIGURES)
    assert found(path) == {"bot": Figures(requests=7)}
    path.write_bytes(data)
    assert found(path) is None


def test_neither_links_nor_pipes_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(FIGURES)
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "real")
    os.mkfifo(pipe)
    assert [found(path) for path in (link, pipe, tmp_path, tmp_path / "none")] == [None] * 4


def found(path: Path) -> dict[str, Figures] | None:
    try:
        return traffic.read(path)
    except OSError:
        return None


async def test_a_disk_that_hangs_holds_up_nobody(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "bot", "a@1003")
        await until(lambda: is_alive(api.ctx))
        monkeypatch.setattr(traffic, "read", lambda path: hangs.wait())
        try:
            assert (await api("aliases"))[0].traffic is None
        finally:
            hangs.set()


async def test_shared_daemon_trusts_only_owners_traffic(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def claims(ctx: Any, uid: int) -> dict[str, Figures]:
        return {"bot": Figures(requests=uid), "other": Figures(requests=uid)}

    monkeypatch.setattr(traffic, "reported_by", claims)
    async with serving(home) as api:
        monkeypatch.setattr(api.ctx, "users", SharedBox())
        monkeypatch.setattr(runs, "owners_of_aliased", lambda store: {"a": 4001, "b": 4002})
        rows = [
            Alias(
                alias=alias, run=run, version=1, updated_at=0.0, owner_uid=0, sha256="", attested="", by=None
            )
            for alias, run in (("bot", "a"), ("other", "b"))
        ]
        reports = await traffic.traffic_of(api.ctx, rows)
    assert reports == {"bot": Figures(requests=4001), "other": Figures(requests=4002)}
