"""What a run says that it keeps on disk is what lies there, also after kills, resumes and a new daemon."""

import os
import signal

import pytest

from lorad.records.runs import KeptFiles
from tests.kit.world import SMALL, World, world

pytestmark = pytest.mark.system

SPEC = SMALL.replace("{every: 2}", "{every: 2, keep: 2, keep_versions: 3}").replace("steps: 6", "steps: 12")


def on_disk(made: World, run: str) -> tuple[int, int, int]:
    """Count versions and checkpoints of the run, and their bytes."""
    root = made.home.run(run)
    found = [[*parent.glob("[0-9]*")] for parent in (root.versions, root.checkpoints)]
    size = sum(file.stat().st_size for kind in found for path in kind for file in path.iterdir())
    return len(found[0]), len(found[1]), size


def within(made: World, run: str) -> KeptFiles:
    """Wait until no more is there than the run says; what it said."""

    def look() -> KeptFiles | None:
        files, (versions, checkpoints, size) = made.client.show(run).files, on_disk(made, run)
        assert files is not None and size <= files.total
        return files if versions <= files.versions and checkpoints <= files.checkpoints else None

    found: KeptFiles = made.until(look, f"{run} keeps what it said")
    return found


@pytest.mark.parametrize(
    "victim", ["driver", *(pytest.param(name, marks=pytest.mark.long) for name in ("pool", "daemon"))]
)
def test_bound_holds_after_kill_and_resume(victim: str) -> None:
    with world() as made:
        told = made.lorad("run", made.spec(SPEC), "--name", "a", "--detach").stderr
        assert "keeps 5 versions and 2 checkpoints, at most " in told
        made.reached("a", 7)
        if victim == "daemon":
            os.kill(made.json("daemon", "status")["pid"], signal.SIGKILL)
            made.lorad("daemon", "start")
        else:
            os.kill(made.pid("a", victim), signal.SIGKILL)
            assert made.over("a").reason == "lost"
            made.lorad("resume", "a", "--wait")
        made.completed("a")
        files = within(made, "a")
        assert (files.versions, files.versions_at_once, files.checkpoints) == (5, 7, 2)
        made.until(lambda: not made.client.gc(dry_run=True).deleted, "nothing is left to delete")
        files = within(made, "a")
        assert on_disk(made, "a") == (files.present_versions, files.present_checkpoints, files.present)
        shown = made.lorad("show", "a").stdout
        assert f"{files.present_versions} versions and 2 checkpoints now, " in shown
