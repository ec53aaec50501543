"""64 episodes of a package at once in one process: what kills it, or hangs, costs its own episode alone."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lorad.envs.programs import Play, Played, Programs
from lorad.spec.env import EnvSpec
from tests.envs.real.test_packages import PYTHONS
from tests.envs.test_verifiers import Door

pytestmark = pytest.mark.skipif(not all(PYTHONS.values()), reason="`make test-verifiers` has the packages")
EPISODES = 64
SAMPLING = {"model": "m@1", "temperature": 1.0, "top_p": 1.0, "max_tokens": 4}


class _Whole(Door):
    """Says all that the client of a package looks for."""

    def send(self, status: int, answer: dict[str, Any]) -> None:
        choices = [{"index": 0, "finish_reason": "stop", **choice} for choice in answer["choices"]]
        about = {"id": "1", "object": "chat.completion", "created": 0, "model": "m@1"}
        super().send(status, about | {"choices": choices})


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Whole) as server:
        monkeypatch.setattr(server, "handle_error", print)  # a client that was killed
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/words/v1"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("version", "name"), [("0.3", "troubled-v0"), ("0.4", "troubled-v1")])
@pytest.mark.parametrize(
    ("fault", "error"), [("kills", "SIGKILL"), ("blocks", "it took 90 s"), ("waits", "it took 90 s")]
)
def test_a_fault_costs_its_own_episode(
    fault: str, error: str, version: str, name: str, door: str, tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    is_old = version == "0.3"
    args = {"noted": str(noted), "count": EPISODES, "faults": [fault]}
    spec = EnvSpec(
        name=f"verifiers:{name}",
        python=PYTHONS[version],
        args=args if is_old else {"taskset": args},
        workers=1,
        concurrency=EPISODES,
        episode_timeout=600.0 if fault == "kills" else 90.0,
        start_timeout=3000.0,
    )
    rows = [
        {
            "index": index,
            "is_held_out": False,
            "prompt": [{"role": "user", "content": text}] if is_old else text,
        }
        for index in range(EPISODES)
        for text in [f"Row {index}."]
    ]
    programs = Programs(spec, tmp_path)

    def play(index: int, *, alone: bool = False) -> Played:
        return programs.play(Play(door, rows[index], SAMPLING), alone=alone)

    begun = time.monotonic()
    with ThreadPoolExecutor(EPISODES) as threads:
        ended = [*threads.map(play, range(EPISODES))]
    plays = [line.split(" ", 2) for line in noted.read_text().splitlines()]
    assert len(plays) == EPISODES and len({pid for pid, _, _ in plays}) == 1
    if fault == "waits":
        assert not any(played.is_shared for played in ended)
    else:
        assert all(played.is_shared for played in ended)
        ended = [play(index, alone=True) for index in reversed(range(EPISODES))][::-1]
    programs.close()
    assert error in ended[0].error and not ended[0].is_shared
    assert [(played.reward, played.error) for played in ended[1:]] == [(1.0, "")] * (EPISODES - 1)
    plays = [line.split(" ", 2) for line in noted.read_text().splitlines()]
    times = Counter(row for _, _, row in plays)
    assert {*times.values()} == {1 if fault == "waits" else 2}
    used = {pid: float(seconds) for pid, seconds, _ in plays}
    print(f"{fault}: {len(plays)} plays of {len(times)} episodes, {time.monotonic() - begun:.0f} s, ", end="")
    print(f"{sum(used.values()):.1f} CPU s in {len(used)} processes until their last episodes began")
