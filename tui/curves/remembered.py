"""What a user chose to see of curves, kept in a file of theirs for the next time."""

import contextlib

import msgspec

from lorad.tui.curves.plot import SHORT, SMOOTH, CurveLook
from lorad.tui.curves.series import AXES
from lorad.tui.state_files import read_state, state_file, write_state

_FILE = "curves.json"


class CurveChoices(msgspec.Struct, frozen=True):
    """The choices of a user. metrics: the charts in order. table: whether figures are shown."""

    metrics: list[str] = []
    x: str = "step"
    smooth: float = 0.6
    log: bool = False
    spikes: bool = False
    best: bool = True
    table: bool = True

    def look(self) -> CurveLook:
        """Return the look that was chosen, as at first where another version wrote what is not known."""
        smooth = self.smooth if self.smooth in SMOOTH else SMOOTH[1]
        return CurveLook(smooth, self.log, self.spikes, self.x if self.x in AXES else AXES[0], self.best)


def choices() -> CurveChoices:
    """Read the choices; they are as at first where there is no file, or one that cannot be read."""
    chosen = CurveChoices()
    with contextlib.suppress(OSError, ValueError):
        chosen = read_state(state_file(_FILE), CurveChoices)
    return chosen if chosen.metrics else msgspec.structs.replace(chosen, metrics=[*SHORT])


def keep(chosen: CurveChoices) -> None:
    """Write them. Where that is not possible, they hold until the end of the session."""
    with contextlib.suppress(OSError):
        write_state(state_file(_FILE), chosen)
