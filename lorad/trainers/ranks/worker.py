"""One rank of a trainer, in the backend's own Python: `python -P -m lorad.trainers.ranks.worker CONFIG.json`.

Rank 0 passes the pool's calls on to the others; all ranks do each call; rank 0 answers. A call that is
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
    pool = None
    if rank == 0:
        pool = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pool.connect(config.socket)
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
    _send(pool, RanksReady(trainer.capabilities(), trainer.modules(), software))
    while True:
        frame: bytearray | None = None
        if pool is not None:
            try:
                frame = frames.exactly(pool.recv_into, frames.PREFIX.size)
                frame += frames.exactly(pool.recv_into, frames.parse_prefix(frame).body)
            except ConnectionError:  # the pool has closed it
                frame = bytearray(b"".join(frames.encode(Request(End()))))
        payload = calls.spread(frame)
        prefix = frames.parse_prefix(payload[: frames.PREFIX.size])
        # torch wants writable arrays
        request = frames.decode(prefix, bytearray(payload[frames.PREFIX.size :]), Request)
        verb: TrainerVerb[Any] = request.verb
        if isinstance(verb, End):
            return
        _send(pool, _answer(verb, trainer, calls, rank))
        HEART.work("")


def _answer(verb: TrainerVerb[Any], trainer: RankTrainer, calls: Calls, rank: int) -> Answer[object]:
    """Do a verb. Raises RuntimeError where another rank alone refuses it."""
    name = type(verb).__name__
    HEART.work(name)
    result: object = None
    refusal: Refusal | None = None
    try:
        result = trainer.do(verb)
    except REFUSALS as error:
        refusal = Refusal.of(error)
    all_alike = calls.all_agree(rank == 0 or refusal is None)
    if refusal is None and not all_alike:
        raise RuntimeError(f"another rank refused {name}")
    if refusal and rank:
        print(f"rank {rank} refused {name}: {refusal.message}", file=sys.stderr, flush=True)
    return Answer(result, refusal, trainer.memory())


def _opened(
    config: RanksConfig, rank: int, path: Path, pool: socket.socket | None
) -> tuple[RankTrainer, Calls]:
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
            _send(pool, Meeting(listener.getsockname()[1]))
        while not meeting_file(path).exists():
            time.sleep(_LOOK_SECONDS)
        host, _, port = meeting_file(path).read_text().rpartition(":")
        calls = join_at(rank, config.ranks, (host, int(port)), listener, device)
    body = open_body(msgspec.structs.replace(config.settings, device=str(device)))
    trainer = RankTrainer(body, calls, config.name)
    calls.all_agree(True)
    return trainer, calls


def _send(pool: socket.socket | None, message: Meeting | RanksReady | Answer[object]) -> None:
    """Send a message of rank 0 to the pool; the other ranks have no connection, and say nothing."""
    if pool is not None:
        for part in frames.encode(message):
            pool.sendall(part)


def run() -> int:
    """Be a rank, and return its exit code.

    Nothing is cleaned up: process groups would wait for other ranks, which may not answer any more.
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
