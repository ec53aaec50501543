"""What `make kill9` found, each by itself."""

from pathlib import Path

import pytest

from lorad.errors import Conflict
from tests.kit.daemon_world import finished, serving

pytestmark = pytest.mark.system


async def test_resume_completes_a_run_killed_after_training(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with pytest.raises(Conflict, match="is to make 6 steps, and its checkpoint has 6"):
            await api("resume", "a")
        with api.ctx.store.write() as connection:
            connection.execute("UPDATE runs SET reason = 'lost'")
        await api("resume", "a")
        run = await api.until("a", "ended")
        assert (run.reason, run.step, run.attempt) == ("completed", 6, 2)
