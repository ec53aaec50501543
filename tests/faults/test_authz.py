"""Who may ask the daemon for what: every request by every kind of user, see `authz.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.authz import unlisted
from tests.kit.passable import why_not


def test_it_is_written_down_for_every_request_who_may_make_it() -> None:
    assert unlisted() == []


def test_each_request_of_each_kind_of_user_comes_to_what_is_written_down() -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.authz"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
