"""A pool of mode split that asks Ray for a node of ranks and one of a stub server, for tests of what it lives
through.

`split_head.py SETUP DIRECTORY`: a `NodesSetup` as JSON. It prints JSON whenever that has changed: `server`,
with its node, the pid of the agent there, and its state; and `ended` with why.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from lorad.errors import LoradError
from lorad.pool.host import opened
from lorad.protocol.nodes import NodesSetup
from lorad.protocol.pool_setup import RanksSetup, ServerSetup
from tests.kit.pool_kit import config_of

_LOOK_SECONDS = 0.05


def _server(setup: NodesSetup) -> ServerSetup:
    return ServerSetup(python=setup.python, servers=1, max_rank=16, targets=("q_proj",), context_length=64)


async def main(setup: NodesSetup, directory: Path) -> None:
    config = config_of(
        directory,
        nodes=setup,
        mode="split",
        trainer="fsdp",
        ranks=RanksSetup(),
        server=_server(setup),
        engine_class="tests.kit.fakes.stub_engine:StubEngine",
    )
    said: dict[str, Any] = {}
    try:
        async with opened(config, directory) as pool:
            (server,) = pool.engine._fleet.servers  # type: ignore[attr-defined]
            while (await pool.work.health()).alive and (await pool.engine.health()).alive:
                now = {"node": server.host.name, "agent": server.host.granted.pid, "state": server.state}
                if now != said:
                    print(json.dumps({"kind": "server", **now}), flush=True)
                    said = now
                await asyncio.sleep(_LOOK_SECONDS)
            print(json.dumps({"kind": "ended", "why": "engine or trainer are over"}), flush=True)
    except LoradError as error:
        print(json.dumps({"kind": "ended", "why": str(error)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=NodesSetup), Path(sys.argv[2])))
