"""The daemon's figures are what Prometheus reads, and say what is so."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

from lorad.box.config import MetricsConfig
from lorad.daemon.api.metrics import exposition, lags, sample
from lorad.errors import LoradError
from lorad.states import Move
from lorad.store import runs
from tests.kit.daemon_world import Api, finished, open_context, serving

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
LINE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (\S+)")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def parsed(text: str) -> tuple[Samples, dict[str, str]]:
    """Samples by name and labels, and kinds by name: by the letter of the text format, version 0.0.4."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    now = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, now, kind = line.split(" ")
            assert now not in kinds and kind in ("counter", "gauge", "histogram", "summary"), line
            kinds[now] = kind
            continue
        found = LINE.fullmatch(line)
        assert found, line
        assert found[1] in {now + suffix for suffix in SUFFIXES.get(kinds[now], ("",))}, (
            f"{line}: after {now}"
        )
        labels = tuple(sorted(re.findall(LABEL, found[2] or "")))
        assert (found[1], labels) not in samples, line
        samples[found[1], labels] = float(found[7])
    return samples, kinds


async def ask(api: Api, head: str = "GET /v1/metrics HTTP/1.1\r\nHost: x") -> str:
    reader, writer = await asyncio.open_unix_connection(str(api.ctx.home.socket))
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return answer.partition("\r\n\r\n")[2]


async def test_the_figures_are_true_and_well_formed(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        await api("swap", "bot", "a@1003")
        with pytest.raises(LoradError):
            await api("show", "nobody")
        await api.run("b")
        await api.until("b", "ended")
        samples, kinds = parsed(await ask(api))
        assert (
            samples["lorad_runs", (("state", "ended"),)] == 2
            and samples["lorad_runs", (("state", "queued"),)] == 0
        )
        assert (samples["lorad_steps_total", ()], samples["lorad_step_seconds_count", ()]) == (12, 12)
        assert samples["lorad_step_seconds_sum", ()] == pytest.approx(12 * 0.02)
        assert samples["lorad_swap_seconds_count", ()] == 1
        assert samples["lorad_swap_seconds_bucket", (("le", "+Inf"),)] == 1
        assert samples["lorad_requests_total", (("method", "GET"), ("status", "404"))] == 1
        assert (
            samples["lorad_leases", (("device", "cpu"), ("pool", "tiny-1"))]
            == samples["lorad_devices", ()]
            == 1
        )
        assert samples["lorad_pool_memory_bytes", (("pool", "tiny-1"),)] > 0
        assert (
            samples["process_resident_memory_bytes", ()] > 1 << 20 and samples["lorad_queue_length", ()] == 0
        )
        assert kinds["lorad_swap_seconds"] == "histogram"
        again, _ = parsed(await ask(api))
        assert again["lorad_steps_total", ()] == 12


async def test_counters_outlive_daemon_and_event_followers_are_counted(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
    async with serving(home) as api:
        follower = await asyncio.open_unix_connection(str(api.ctx.home.socket))
        follower[1].write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await follower[0].readline()
        samples, _ = parsed(await ask(api))
        assert samples["lorad_steps_total", ()] == 6 and samples["lorad_event_followers", ()] == 1
        follower[1].close()
        await follower[1].wait_closed()


async def test_active_runs_have_figures_of_their_own(home: Path) -> None:
    ctx = open_context(home)
    finished(ctx)
    finished(ctx, "over")
    for move in (Move.RESUME, Move.PLACE):
        runs.move(ctx.store, "a", move)
    samples, kinds = parsed(await exposition(ctx))
    of_runs = {name: value for (name, labels), value in samples.items() if name.startswith("lorad_run_")}
    row = runs.get(ctx.store, "a")
    assert (of_runs["lorad_run_step"], of_runs["lorad_run_reward"]) == (6, row.reward)
    assert kinds["lorad_run_kl"] == kinds["lorad_run_tokens_per_second"] == "gauge"
    assert {labels for name, labels in samples if name == "lorad_run_step"} == {(("run", "a"),)}
    ctx.readers.close()


def test_labels_are_escaped() -> None:
    told = sample("x", {"of": 'a "b"\\c\nd'}, 1)
    assert told == 'x{of="a \\"b\\"\\\\c\\nd"} 1' and LINE.fullmatch(told)


async def test_the_port_answers_to_its_own_names_alone(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with serving(home, metrics=MetricsConfig(port)):

        async def get(host: str, path: str = "/metrics", more: str = "") -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            writer.close()
            await writer.wait_closed()
            return answer

        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            answer = await get(host)
            assert answer.startswith("HTTP/1.1 200") and parsed(answer.partition("\r\n\r\n")[2])
        strange = ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil:{port}", f"127.0.0.1:{port + 1}")
        for host in (*strange, ""):
            assert (await get(host)).startswith("HTTP/1.1 4"), host
        assert (await get(f"localhost:{port}", more="Origin: http://evil.example\r\n")).startswith(
            "HTTP/1.1 403"
        )
        assert (await get(f"localhost:{port}", "/v1/runs")).startswith("HTTP/1.1 404")


async def test_taken_port_disables_only_metrics(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with serving(home, metrics=MetricsConfig(taken.getsockname()[1])) as api:
            assert (await api("status")).pid


async def test_a_journal_that_nobody_takes_in_is_told(home: Path) -> None:
    ctx = open_context(home)
    finished(ctx)
    with ctx.store.write() as connection:
        connection.execute("UPDATE runs SET state = 'running', reason = NULL")
        connection.execute('UPDATE journal_offsets SET "offset" = "offset" - 100')
    ((name, (behind, _)),) = lags(ctx.store)
    assert (name, behind) == ("a", 100)
    ctx.readers.close()
    ctx.store.close()
    ctx.journal.close()
