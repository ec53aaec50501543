"""Run one attempt of one model: `python -m lorad.tinker.lane ATTEMPT_DIR`.

SIGTERM asks it to park: it saves, and gives its slot back. Exit codes: see `lorad/driver/attempt/main.py`.
"""

import sys
from pathlib import Path

from lorad.startup import quick_imports

with quick_imports():
    from lorad.box.paths import RunDir
    from lorad.driver.attempt.main import StopFlag, end_by, load_spec, run_attempt
    from lorad.driver.attempt.pool import connect
    from lorad.protocol.driver_params import DriverParams
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.journal import EndFact, JournalWriter
    from lorad.tinker.lane.lane import Lane
    from lorad.tinker.lane.model import Model
    from lorad.tinker.lane.state import RESULTS, State
    from lorad.tinker.log import LogWriter


def attempt(
    params: DriverParams, run_dir: RunDir, journal: JournalWriter, stop: StopFlag
) -> tuple[EndFact, int]:
    """Do requests until a stop, and return why it ended, and the last step that counts."""
    state = State()
    try:
        HEART.work("begin")
        spec = load_spec(run_dir, params)
        (run_dir.root / RESULTS).parent.mkdir(mode=0o700, exist_ok=True)
        with LogWriter(run_dir.root / RESULTS) as results:
            pool = connect(params, stop)
            if pool is None:
                return EndFact("stopped", "before its pool was ready"), 0
            with pool:
                model = Model(spec, params, run_dir, pool, journal)
                lane = Lane(model, pool, journal, results, run_dir.root)
                end = lane.drive(state, stop, every=spec.checkpoint.every, steps=params.steps)
                return end, state.step
    except Exception as error:
        return end_by(error, journal, run_dir), state.step


if __name__ == "__main__":
    sys.exit(run_attempt(Path(sys.argv[1]), attempt))
