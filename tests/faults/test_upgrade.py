"""An upgrade is a restart of the daemon under running jobs, and there is a way back: see `upgrade.py`."""

import pytest

from faults.upgrade import upgrade

pytestmark = pytest.mark.system


def test_upgrade_and_rollback_lose_nothing() -> None:
    upgrade(1, ("amid the migration",))
