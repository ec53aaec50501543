"""Where a pool has no nodes, nothing of theirs is loaded."""

import subprocess
import sys

import pytest

from tests.nodes.kit import ROOT

CODE = """
import sys
import lorad.cli.app, lorad.daemon.daemon, lorad.driver.driver, lorad.pool.host, lorad.engines.remote.engine
import lorad.preflight.__main__, lorad.gateway.__main__, lorad.tui.app, lorad.api, lorad.trainers.ranks.worker
THEIRS = ("lorad.nodes", "lorad.grants", "cryptography", "ray")
print(*(name for name in sys.modules if name.startswith(THEIRS)))
"""


@pytest.mark.system
def test_one_machine_loads_nothing_of_nodes() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("\n", "")
