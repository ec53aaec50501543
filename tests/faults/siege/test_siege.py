"""No request on any route is a defect, or takes the daemon long: `requests.py` walks the table of routes."""

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from faults.siege.requests import body_of, requests
from lorad.daemon.api.verbs import ROUTES
from tests.daemon.test_daemon import raw
from tests.kit.daemon_world import finished, serving
from tests.kit.passable import why_not
from tests.kit.warm.processes import python

BODILESS = {"pause", "stop", "kill", "pin", "unpin", "verify"}  # POST requests that say nothing
LATER = {"/v1/shutdown", "/v1/generate", "/v1/try"}  # these end the daemon, or start processes


def test_every_route_and_body_is_besieged() -> None:
    read = {handler.__name__: body_of(handler) for method, _, handler, _ in ROUTES if method == "POST"}
    assert {name for name, kind in read.items() if kind is None} == BODILESS
    assert {(asked.method, asked.route) for asked in requests()} == {
        (method, path) for method, path, *_ in ROUTES
    }


@pytest.mark.system
async def test_parts_at_their_bounds_are_no_defect(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx, "mine")
        first = {kind: path for _, path, handler, _ in ROUTES if (kind := body_of(handler))}
        for asked in requests():
            at_bound = asked.route in first.values() and re.match(r"\w+ 0: ", asked.what)
            if (at_bound or asked.what in ("depth", "NUL")) and asked.route not in LATER:
                status, answer = await asyncio.to_thread(
                    raw, api.client, asked.method, asked.path, asked.body()
                )
                assert status != 500, (asked, answer)


@pytest.mark.system
def test_no_user_besieges_a_shared_daemon() -> None:
    """By each forty-first request; `make siege` sends all."""
    if reason := why_not():
        pytest.skip(reason)
    command = [*python(), "-m", "faults.siege", "--within", "0", "--every", "41"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
