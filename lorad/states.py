"""The life of a run: its states, why it ended, and every move that is allowed.

    queued -> starting -> running -> stopping -> paused | ended

*Why it ended* (`EndReason`) is not a state. All moves are in `MOVES`; the store makes each one as a
compare-and-swap together with its event, in one transaction.
"""

from enum import StrEnum


class RunState(StrEnum):
    """Where a run is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    ENDED = "ended"

    @property
    def is_active(self) -> bool:
        """Return whether a driver or a pool may be working for a run in this state."""
        return self in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)

    @property
    def is_over(self) -> bool:
        """Return whether nothing works for the run any more, so that it may be resumed."""
        return self in (RunState.PAUSED, RunState.ENDED)


ACTIVE = tuple(state for state in RunState if state.is_active)


class EndReason(StrEnum):
    """Why a run ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    KILLED = "killed"
    FAILED = "failed"
    LOST = "lost"
    ATTESTATION_FAILED = "attestation_failed"
    IMPORTED = "imported"  # it never trained: its version came from a directory


class Move(StrEnum):
    """What can happen to a run."""

    PLACE = "place"
    CONFIRM = "confirm"
    STOP = "stop"
    PAUSE = "pause"
    END = "end"
    RESUME = "resume"
    RESTART = "restart"


_Q, _S, _R, _T, _P, _E = RunState
MOVES: dict[Move, dict[RunState, RunState]] = {
    Move.PLACE: {_Q: _S},  # devices leased, pool and driver are being started
    Move.CONFIRM: {_S: _R},  # the driver's first record was read
    Move.STOP: {_S: _T, _R: _T},  # a graceful stop was asked for (pause, stop) or a kill
    Move.PAUSE: {_T: _P, _Q: _P},  # the graceful stop is over and the run is to be resumed later
    Move.END: {_Q: _E, _S: _E, _R: _E, _T: _E, _P: _E},
    Move.RESUME: {_P: _Q, _E: _Q},
    Move.RESTART: {_E: _Q},  # by the daemon itself, after an end that the run's spec wants mended
}
