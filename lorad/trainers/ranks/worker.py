"""One rank of a trainer: `python -P -m lorad.trainers.ranks.worker CONFIG.json`, in the backend's own
environment.

Rank 0 talks to the pool and passes on what it hears; all ranks do each call; rank 0 answers. A call that is
refused changes nothing. Any other failure ends the rank, and with it the trainer.
"""

import contextlib
import faulthandler
import importlib
import importlib.metadata
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    import torch

    from lorad.errors import LoradError, SpecError, to_wire
    from lorad.models.ops import prepare
    from lorad.protocol import frames
    from lorad.protocol.calls import TrainerVerb
    from lorad.protocol.heartbeat import DUMP, HEART
    from lorad.trainers.ranks.calls import REFUSALS, Answer, End, Meeting, RanksReady, Refusal, Request
    from lorad.trainers.ranks.config import FAILED, RanksConfig, beat_file, meeting_file, refusal_file
    from lorad.trainers.sharded.body import Body, BodySettings
    from lorad.trainers.sharded.trainer import RankTrainer
    from lorad.trainers.sharded.workers import Calls, join, join_at

_LOOK_SECONDS = 0.05  # between two looks for where the ranks meet
_SOFTWARE = ("torch", "transformers", "peft", "megatron-core", "megatron-bridge", "transformer-engine")


def main(path: Path, rank: int) -> None:
    faulthandler.register(DUMP, all_threads=True)
    HEART.start(beat_file(path, rank))
    config = msgspec.json.decode(path.read_bytes(), type=RanksConfig)
    with _Pool(config.socket if rank == 0 else None) as pool:
        try:
            trainer, calls = _opened(config, rank, path, pool)
        except LoradError as error:
            # the pool cannot hear from this rank in any other way yet
            draft = path.with_name(f"refusal-{rank}.json")
            draft.write_bytes(msgspec.json.encode(to_wire(error)))
            draft.rename(refusal_file(path))
            raise
        software = {}
        for name in _SOFTWARE:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                software[name] = importlib.metadata.version(name)
        pool.tell(RanksReady(trainer.capabilities(), trainer.modules(), software))
        while True:
            payload = calls.spread(pool.hear())
            prefix = frames.parse_prefix(payload[: frames.PREFIX.size])
            # torch wants writable arrays
            request = frames.decode(prefix, bytearray(payload[frames.PREFIX.size :]), Request)
            verb: TrainerVerb[Any] = request.verb
            if isinstance(verb, End):
                return
            answer: Answer[object]
            name = type(verb).__name__
            HEART.work(name)
            try:
                answer = Answer(result=trainer.do(verb))
            except REFUSALS as error:
                answer = Answer(refusal=Refusal.of(error))
            all_alike = calls.all_agree(rank == 0 or answer.refusal is None)
            if answer.refusal is None and not all_alike:
                raise RuntimeError(f"another rank refused {name}")
            if answer.refusal and rank:
                print(f"rank {rank} refused {name}: {answer.refusal.message}", file=sys.stderr, flush=True)
            pool.tell(msgspec.structs.replace(answer, memory=trainer.memory()))
            HEART.work("")


def _opened(config: RanksConfig, rank: int, path: Path, pool: "_Pool") -> tuple[RankTrainer, Calls]:
    """Open this rank's trainer; returns when every rank has one.

    Raises SpecError, AdapterRefused, … for settings that the backend does not take.
    """
    device = torch.device(config.devices[rank])
    torch.set_num_threads(config.threads)
    prepare(device)
    module, _, name = config.body.partition(":")
    try:
        open_body: Callable[[BodySettings], Body] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"{sys.executable} cannot import {config.body}: {error}",
            key="trainer.backend",
            hint="`lorad doctor` says what to install there, or name another interpreter in config.yaml.",
        ) from error
    # meet the other ranks, see `RanksConfig.meeting`
    scheme, _, place = config.meeting.partition("://")
    if scheme == "file":
        calls = join(rank, config.ranks, Path(place), device)
    else:
        listener = None
        if rank == 0:
            family = socket.AF_INET6 if ":" in place else socket.AF_INET
            listener = socket.create_server((place, 0), family=family)
            pool.tell(Meeting(listener.getsockname()[1]))
        while not meeting_file(path).exists():
            time.sleep(_LOOK_SECONDS)
        host, _, port = meeting_file(path).read_text().rpartition(":")
        calls = join_at(rank, config.ranks, (host, int(port)), listener, device)
    body = open_body(msgspec.structs.replace(config.settings, device=str(device)))
    trainer = RankTrainer(body, calls, config.name)
    calls.all_agree(True)
    return trainer, calls


class _Pool:
    """The connection of rank 0 to the pool. The other ranks have none: their `path` is None."""

    def __init__(self, path: str | None) -> None:
        self._socket = None
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(path)

    def hear(self) -> bytearray | None:
        """Return the next call's frame; the frame of `End` when there is none."""
        if self._socket is None:
            return None
        try:
            prefix = frames.exactly(self._socket.recv_into, frames.PREFIX.size)
            return prefix + frames.exactly(self._socket.recv_into, frames.parse_prefix(prefix).body)
        except ConnectionError:
            return bytearray(b"".join(frames.encode(Request(End()))))

    def tell(self, message: Meeting | RanksReady | Answer[object]) -> None:
        if self._socket is not None:
            for part in frames.encode(message):
                self._socket.sendall(part)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def run() -> int:
    """Be a rank, and return its exit code. Nothing is cleaned up: other ranks may not answer any more, and
    process groups wait for them.
    """
    try:
        main(Path(sys.argv[1]), int(os.environ["RANK"]))
        return 0
    except BaseException:
        # in one piece: the other ranks, which fail for want of this one, write into the same log
        sys.stderr.write(f"lorad: rank {os.environ['RANK']} {FAILED}\n{traceback.format_exc()}")
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    os._exit(run())
