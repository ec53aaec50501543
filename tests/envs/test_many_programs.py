"""Agent programs that share a process: each ends for itself, and a lost process says who was there."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorad.envs.programs import Play, Played, Programs
from lorad.errors import SpecError
from lorad.spec.env import EnvSpec

MANY = """
import asyncio, os, time

together = most = port = called = 0

async def answer(reader, writer):
    global called
    called = 1
    while together > 1:
        await asyncio.sleep(0.005)
    for _ in range(20):  # the episode that began the server is over, and its tasks are
        await asyncio.sleep(0.005)
    writer.write(b"answer")
    writer.close()

async def run(base_url, task, sampling):
    global together, most, port
    together += 1
    most = max(most, together)
    try:
        if task["does"] == "block":
            time.sleep(600)
        if task["does"] == "die":
            os.kill(os.getpid(), 9)
        if task["does"] == "exit":
            raise SystemExit(3)
        if task["does"] == "leave":
            asyncio.create_task(asyncio.sleep(600), name="left")
        if task["does"] == "wait":
            await asyncio.sleep(600)
        if task["does"] == "meet":
            while most < task["others"]:
                await asyncio.sleep(0.005)
        if task["does"] == "serve":
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            while not called:
                await asyncio.sleep(0.005)
        if task["does"] == "ask":
            while not port:
                await asyncio.sleep(0.005)
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            return float(await reader.read() == b"answer")
        left = any(each.get_name() == "left" for each in asyncio.all_tasks())
        return 1.0, {"pid": os.getpid(), "left": left}
    finally:
        together -= 1
"""


def of(does: str, others: int = 0) -> Play:
    return Play("http://127.0.0.1:9/v1", {"does": does, "others": others}, {})


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Callable[..., list[Played]]]:
    """Plays episodes at once, 64 at most in the one process of the programs."""
    (tmp_path / "many.py").write_text(MANY)
    opened = list[Programs]()

    def play(*does: str, timeout: float = 60.0, workers: int = 1) -> list[Played]:
        spec = EnvSpec(name="many.py:run", workers=workers, concurrency=64, episode_timeout=timeout)
        opened.append(Programs(spec, tmp_path))
        with ThreadPoolExecutor(len(does)) as threads:
            return [*threads.map(opened[-1].play, [of(each, others=len(does)) for each in does])]

    yield play
    for programs in opened:
        programs.close()


def test_a_process_plays_many_episodes_at_once(many: Callable[..., list[Played]]) -> None:
    ended = many(*["meet"] * 64)
    assert {played.reward for played in ended} == {1.0}
    assert len({played.metrics["pid"] for played in ended}) == 1


def test_a_slow_episode_ends_alone(many: Callable[..., list[Played]]) -> None:
    slow, quick = many("wait", "return", timeout=1.0)
    assert slow.error == "it took 1 s (env.episode_timeout)" and not slow.is_shared
    assert quick.reward == 1.0


@pytest.mark.parametrize("fault", ["block", "die"])
def test_who_shares_a_lost_process_is_told(many: Callable[..., list[Played]], fault: str) -> None:
    for played in many(fault, "wait", timeout=2.0):
        assert played.is_shared and played.error


def test_an_episode_alone_has_a_process_for_itself(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    programs = Programs(EnvSpec(name="many.py:run", workers=1, concurrency=64), tmp_path)
    with ThreadPoolExecutor(9) as threads:
        others = [threads.submit(programs.play, of("return")) for _ in range(8)]
        alone = threads.submit(programs.play, of("die"), alone=True).result()
        assert "SIGKILL" in alone.error and not alone.is_shared
        assert {other.result().reward for other in others} == {1.0}
    programs.close()


def test_tasks_do_not_outlive_their_episode(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    programs = Programs(EnvSpec(name="many.py:run", workers=1), tmp_path)
    assert [programs.play(of(does)).metrics["left"] for does in ("leave", "return")] == [1.0, 0.0]
    programs.close()


def test_a_server_outlives_the_episode_that_began_it(many: Callable[..., list[Played]]) -> None:
    served, asked = many("serve", "ask")
    assert (served.error, asked.error, asked.reward) == ("", "", 1.0)


def test_a_slow_import_names_its_limit(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ntime.sleep(600)\n\nasync def run(*given): ...\n")
    programs = Programs(EnvSpec(name="slow.py:run", start_timeout=0.2), tmp_path)
    with pytest.raises(SpecError, match=r"no result within 0\.2 s while .*slow\.py was imported") as refused:
        programs.start()
    assert refused.value.hint == "Mend slow.py, or raise env.start_timeout."
    programs.close()
