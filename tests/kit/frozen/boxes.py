"""Two boxes of a hosts.yaml: h2 answers from memory, with runs and an alarm, and h3 is refused by ssh."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorad import errors
from lorad.client.boxes.entry import BoxEntry
from lorad.client.boxes.remote import FarDaemon, FarHome
from lorad.client.transport import Transport
from lorad.tui import watch
from tests.kit.tui_world import DEVICE, GIB, Prepared, World, a_run


@dataclass(frozen=True)
class Far(FarHome):
    """A box whose daemon has a world; one without a world is refused by ssh."""

    world: World | None = None

    def transport(self, timeout: float) -> Transport:  # type: ignore[override]
        if self.world is None:
            message = f"host {self.name} cannot be reached: Permission denied"
            raise errors.HostUnreachable(message, hint=f"`ssh {self.name}` has to work.")
        return Prepared(self.world)

    def facts(self) -> FarDaemon:
        return FarDaemon("", "", "", 1, "ann", True, "/home/ann")


def two_boxes(home: Path, directory: Path, patch: pytest.MonkeyPatch) -> World:
    """Write a hosts.yaml into `directory` for the dashboard of this process, whose home is `home`; return the
    world of h2.
    """
    (directory / "lorad").mkdir()
    hosts = {name: {"ssh": name} for name in ("h2", "h3")}
    (directory / "lorad/hosts.yaml").write_text(json.dumps({"hosts": hosts}))
    world = World(
        a_run("far", signals={"at": time.time(), "kl": 0.9}),
        a_run("waits-far", state="queued"),
        a_run("broken", state="ended", reason="failed"),
    )
    leased = {**DEVICE, "lease": {"pool": "qwen-1", "user": "ann", "since": time.time() - 9000}}
    free = {"device": "cuda:1", "name": "H100", "memory_total": 80 * GIB}
    world.answers |= {"devices": [{**leased, "processes": []}, free], "pools": [], "events": []}
    world.answers["POST select"] = {"items": world.runs}
    world.answers["status"] = {
        "pid": 1,
        "caller": {"user": "ann", "admin": True},
        "runs": {"running": 1, "queued": 1, "ended": 1},
    }
    worlds = {"h2": world}
    patch.setenv("XDG_CONFIG_HOME", str(directory))
    patch.setenv("LORAD_HOME", str(home))
    patch.setattr(watch, "default_home", lambda: home)
    patch.setattr(
        watch, "far_home", lambda name, asks: Far(name, BoxEntry(name), asks=asks, world=worlds.get(name))
    )
    return world
