"""Who may ask the daemon for what: every request by every kind of user, see `authz.py`."""

import subprocess

import pytest

from faults.authz import unlisted
from tests.kit.passable import why_not
from tests.kit.warm.processes import python

pytestmark = pytest.mark.system


def test_every_request_has_its_rights_listed() -> None:
    assert unlisted() == []


def test_each_user_gets_exactly_the_listed_rights() -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run([*python(), "-m", "faults.authz"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
