"""kill -9 of door, lane, pool and daemon at random moments, and answers that are lost, under a client that
only repeats: `python -m tests.tinker.crash [STEPS] [KILLS] [LOST]`.

The same steps twice, undisturbed and disturbed: all that the client was told, the weights and Adam's moments
must be equal, bit for bit.
"""

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lorad.box.keys import make_key
from lorad.daemon.process.processes import attempts_under, read_status
from lorad.errors import LoradError
from lorad.tinker.door.messages import M
from tests.kit.pool_kit import TINY
from tests.kit.world import World, world
from tests.tinker.door_kit import BASE, put
from tests.tinker.lane_kit import same, tensors_in

_PROTOBUF = "application/x-protobuf"
_PATIENCE = 120.0  # seconds for which the client repeats a request
_AGAIN = (408, 429, 500, 502, 503)
RUN = "tinker-{}-0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Asker:
    """Trains one model as a client.

    lost: the share of answers that it never gets, and asks for again.
    """

    def __init__(self, port: int, key: str, lost: float = 0.0) -> None:
        self._port, self._key, self._lost = port, key, lost
        self._random, self._samples = random.Random(port), 0
        self.told: list[bytes] = []
        self.session = str(self.ask("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"])
        lora = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": False}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        self.model = str(self.ask("create_model", body)["model_id"])
        self.wait(f"{self.model}:0")
        self.seq = 0

    def ask(self, path: str, body: Any) -> Any:
        return json.loads(self._post(path, body)[1])

    def send(self, verb: str, body: Any) -> str:
        """Send the next numbered request; returns its future."""
        answer = self.ask(verb, body)
        return str(answer["request_id"])

    def numbered(self, verb: str, **body: Any) -> str:
        self.seq += 1
        return self.send(verb, {"model_id": self.model, "seq_id": self.seq, **body})

    def forward_backward(self, seed: int) -> str:
        self.seq += 1
        rng = np.random.default_rng(seed)
        message = M["ForwardBackwardRequest"](model_id=self.model, seq_id=self.seq, loss_fn="cross_entropy")
        for size in rng.integers(2, 9, 3).tolist():
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = (
                rng.integers(4, 100, size).astype(np.int32).tobytes()
            )
            put(datum, "target_tokens", rng.integers(4, 100, size).astype(np.int64))
            put(datum, "weights", rng.random(size).astype(np.float32))
        return self.send("forward_backward", message.SerializeToString())

    def wait(self, request: str) -> bytes:
        """Poll a future until it has a result."""
        found = self._post("retrieve_future", {"request_id": request})[1]
        assert b'"error"' not in found, found
        return found

    def tell(self, *passes: str, step: str) -> None:
        """Note the results of passes and of their step; the door may order a map in any way."""
        found = [M["ForwardBackwardOutput"].FromString(self.wait(one)) for one in passes]
        self.told += [one.SerializeToString(deterministic=True) for one in found]
        self.told.append(self.wait(step))

    def sample(self, path: str) -> bytes:
        """Sample of a checkpoint; a request that was lost is sent again under a new number."""
        body = {"session_id": self.session, "sampling_session_seq_id": self._samples, "model_path": path}
        sampler = self.ask("create_sampling_session", body)["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        asked = {"prompt": prompt, "sampling_params": {"max_tokens": 8, "seed": 3}, "num_samples": 1}
        while True:
            self._samples += 1
            sent = self.ask("asample", {"sampling_session_id": sampler, "seq_id": self._samples, **asked})[
                "request_id"
            ]
            status, found = self._post("retrieve_future", {"request_id": sent}, final=(200, 410))
            if status == http.client.OK:
                return bytes(M["SampleResponse"].FromString(found).sequences[0].tokens)

    def _post(self, path: str, body: Any, final: tuple[int, ...] = (200,)) -> tuple[int, bytes]:
        kind = _PROTOBUF if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": self._key, "Content-Type": kind, "Accept": _PROTOBUF}
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                connection.request("POST", f"/api/v1/{path}", data, headers)
                response = connection.getresponse()
                found = response.read()
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
                continue
            finally:
                connection.close()
            if response.status in final and self._random.random() >= self._lost:
                return response.status, found
            assert response.status in (*final, *_AGAIN), (path, response.status, found)
        raise AssertionError(f"{path}: no answer within {_PATIENCE:.0f} s")


def train(asker: Asker, steps: int, seed: int = 0) -> None:
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    for step in range(steps):
        futures = [asker.forward_backward(seed + step), asker.forward_backward(1000 + seed + step)]
        asker.tell(*futures, step=asker.numbered("optim_step", adam_params=adam))
        if step % 7 == 3:
            future = asker.numbered("save_weights_for_sampler", path=f"s{step}")
            path = json.loads(asker.wait(future))["path"]
            asker.told.append(asker.sample(path))
    asker.wait(asker.numbered("save_weights", path="end"))


@contextlib.contextmanager
def box(**settings: Any) -> Iterator[tuple[World, int, str]]:
    """A home with a door, which may have further settings: its port, and a key."""
    with world() as made:
        port = free_port()
        made.home.root.mkdir(parents=True, exist_ok=True)
        made.home.config.write_text(
            json.dumps({"tinker": {"port": port, "bases": {BASE: str(TINY)}, **settings}})
        )
        made.home.root.chmod(0o700)
        key = make_key(made.home.tinker / "keys.yaml", "alice")
        made.lorad("daemon", "start")
        yield made, port, key


class Disturber(threading.Thread):
    """Kills one process after another, each a moment after the client has so many results.

    pace: the seconds of a result where nobody is killed; the moment is as long at most.
    """

    def __init__(self, made: World, asker: Asker, kills: int, results: int, pace: float) -> None:
        super().__init__(daemon=True)
        self._made, self._asker, self._pace = made, asker, pace
        self._places = sorted(random.sample(range(1, results), kills))
        self.killed: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        for number, place in enumerate(self._places):
            victim = ("door", "driver", "pool", "daemon")[number % 4]
            while len(self._asker.told) < place and not self.over.is_set():
                time.sleep(0.01)
            if self.over.wait(random.uniform(0, self._pace)):
                return
            if (pid := self._pid(victim)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(victim)
            if victim == "daemon":
                self._made.lorad("daemon", "start")

    def _pid(self, victim: str) -> int | None:
        with contextlib.suppress(LoradError, OSError):
            if victim == "daemon":
                return self._made.client.status().pid
            if victim == "door":
                status = read_status([*attempts_under(self._made.home.tinker)][-1])
                return int(status["pid"]) if status else None
            shown = self._made.client.show(RUN.format(self._asker.session))
            return next((one.pid for one in shown.processes if one.role == victim), None)
        return None


class Outcome(NamedTuple):
    """What a client got, and what was killed meanwhile.

    told: the results.
    pace: the seconds of each result.
    tensors: the weights at the end.
    killed: the kinds of processes that were killed, in order.
    """

    told: list[bytes]
    pace: float
    tensors: dict[str, np.ndarray]
    killed: list[str]


def outcome(steps: int, kills: int, lost: float, pace: float = 0.0) -> Outcome:
    """Train, and kill so many processes meanwhile; `Disturber` explains `pace`."""
    with box() as (made, port, key):
        asker = Asker(port, key, lost)
        disturber = Disturber(made, asker, kills, 3 * steps, pace)
        disturber.start()
        started = time.monotonic()
        try:
            train(asker, steps)
        finally:
            disturber.over.set()
            disturber.join()
        seconds = (time.monotonic() - started) / len(asker.told)
        tensors = tensors_in(made.home.run(RUN.format(asker.session)).root)
        return Outcome(asker.told, seconds, tensors, disturber.killed)


def main(steps: int = 300, kills: int = 10, lost: float = 0.03) -> None:
    calm_told, pace, calm, _ = outcome(steps, 0, 0.0)
    started = time.monotonic()
    told, _, tensors, killed = outcome(steps, kills, lost, pace)
    assert killed or not kills, "nothing was killed"
    assert len(told) == len(calm_told) and calm, "not as many results"
    differing = [place for place, both in enumerate(zip(told, calm_told, strict=True)) if both[0] != both[1]]
    assert not differing, f"results {differing[:5]} differ"
    assert same(tensors, calm), "the weights or Adam's moments differ"
    digest = hashlib.sha256(b"".join(calm[name].tobytes() for name in sorted(calm))).hexdigest()
    seconds = time.monotonic() - started
    print(
        f"{steps} steps, killed: {', '.join(killed)}; {lost:.0%} of the answers lost; {seconds:.0f} s: "
        f"{len(told)} results and {len(calm)} tensors ({digest[:12]}) are equal"
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*(kind(text) for kind, text in zip((int, int, float), given, strict=False)))
