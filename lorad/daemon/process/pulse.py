"""Tell by heartbeats which process hangs, which one is stuck, and which one is only slow."""

from dataclasses import dataclass, field

from lorad.box.config import Supervision
from lorad.daemon.process.doing import Activity
from lorad.protocol.heartbeat import Beat

_LEAST_GAP = 5.0  # seconds between two looks after which the daemon itself may have slept


@dataclass
class Pulse:
    """The heartbeats that were seen of one process.

    Times are of the daemon's own monotonic clock, so that a process is not blamed when the clock is set or
    the machine sleeps.

    beat_at: when it last showed another beat.
    got_on_at: when it last showed progress, or had nothing to do.
    doubted: an earlier daemon was about to kill it.
    activity: what it is doing, in its own words.
    """

    beat: Beat
    beat_at: float
    got_on_at: float
    doubted: bool = False
    activity: Activity = field(init=False)

    def __post_init__(self) -> None:
        self.activity = Activity(self.beat.words, self.beat_at)

    def see(self, beat: Beat, now: float) -> None:
        """Take note of what its file says now."""
        if beat == self.beat:
            return
        if beat.progress != self.beat.progress or not beat.doing:
            self.got_on_at = now
        self.activity.hear(beat.words, now)
        self.beat = beat
        self.beat_at = now

    def begin_again(self, now: float) -> None:
        """Give it as much time as in the beginning, as whoever watched it was away."""
        self.beat_at = self.got_on_at = now

    def trouble(self, now: float, limits: Supervision) -> str:
        """Say what is wrong with the process; "" when nothing is."""
        if now - self.beat_at > limits.hang:
            return f"was hung: no heartbeat for {now - self.beat_at:.0f} s"
        if self.beat.doing and now - self.got_on_at > limits.stall:
            return f"was stuck: no progress for {now - self.got_on_at:.0f} s, at {self.beat.doing!r}"
        return ""


def was_away(before: float, now: float, limits: Supervision) -> bool:
    """Check whether so much time lies between two looks that the processes may have slept as well."""
    return now - before > max(_LEAST_GAP, limits.hang / 2)
