"""A pool that asks Ray for nodes and trains over them, for tests of what ends when something dies.

`pool_head.py SETUP DIRECTORY`: a `NodesSetup` as JSON. It prints JSON: `ready`, then `ended` with why.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec

from lorad.errors import LoradError
from lorad.grants.grant import taken
from lorad.protocol.nodes import NodesSetup
from tests.kit.fakes.rank_kit import LOSS, SPEC, batch, targets
from tests.nodes.kit import tiny_trainer

_HANG = 10.0  # seconds without a heartbeat of a rank


def _say(kind: str, **fields: object) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


async def main(setup: NodesSetup, directory: Path) -> None:
    began = time.monotonic()
    try:
        async with taken(setup, directory.name, directory, directory) as grant:
            granted = time.monotonic() - began
            trainer = await tiny_trainer(directory, grant.hosts, hang=_HANG)
            ready = time.monotonic() - began
            _say("ready", nodes=[node.name for node in grant.hosts], granted=granted, ready=ready)
            await trainer.open("a", SPEC)
            while True:
                await trainer.forward_backward("a", batch(), targets(batch()), LOSS, 16)
                await trainer.optim_step("a", 0.1, 1.0)
                await asyncio.sleep(0.05)
    except LoradError as error:
        _say("ended", why=str(error))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=NodesSetup), Path(sys.argv[2])))
