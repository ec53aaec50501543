"""An upgrade is a restart of the daemon under running jobs, and there is a way back: see `upgrade.py`."""

from __future__ import annotations

from tests.faults.upgrade import upgrade


def test_an_upgrade_and_its_way_back_stop_no_run_and_lose_nothing() -> None:
    upgrade(1, ("amid the migration",))
