"""A pool that asks Ray for nodes and trains over them, for tests of what ends when something dies.

`pool_head.py SETUP DIRECTORY`: a `NodesSetup` as JSON. It prints JSON: `ready`, then `ended` with why. While
there is a file `files` in the directory, each step is followed by the loading of a checkpoint: `loaded`, or
`refused`.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec

from lorad.errors import LoradError, PoolLost, StorageError
from lorad.grants.grant import hold_nodes
from lorad.protocol.nodes import NodesSetup
from lorad.trainers.ranks.remote import RemoteTrainer
from tests.kit.fakes.rank_kit import LOSS, SPEC, batch, targets
from tests.nodes.kit import tiny_trainer

_HANG = 10.0  # seconds without a heartbeat of a rank


def _say(kind: str, **fields: object) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


async def _load(trainer: RemoteTrainer, place: Path) -> None:
    """Have a checkpoint put on both nodes, and say how that went."""
    if "adapter_model.safetensors" not in os.listdir(place):
        await trainer.save("a", place)
    try:
        await trainer.load("a", place)
        _say("loaded")
    except StorageError as error:
        _say("refused", why=str(error))


async def main(setup: NodesSetup, directory: Path) -> None:
    began = time.monotonic()
    saved = directory / "saved"
    saved.mkdir()
    try:
        async with hold_nodes(setup, directory.name, directory, directory) as grant:
            granted = time.monotonic() - began
            trainer = await tiny_trainer(directory, grant.hosts, hang=_HANG)
            ready = time.monotonic() - began
            _say("ready", nodes=[node.name for node in grant.hosts], granted=granted, ready=ready)
            await trainer.open("a", SPEC)
            while True:
                await trainer.forward_backward("a", batch(), targets(batch()), LOSS, 16)
                await trainer.optim_step("a", 0.1, 1.0)
                if (directory / "files").exists():
                    await _load(trainer, saved)
                await asyncio.sleep(0.05)
                if any(node.leaving.done() for node in grant.hosts):  # the daemon would end the pool
                    raise PoolLost("a node was asked to end")
    except LoradError as error:
        _say("ended", why=str(error))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=NodesSetup), Path(sys.argv[2])))
