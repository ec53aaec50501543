"""What screens, tabs and widgets use of the application that shows them."""

from collections.abc import Sequence
from typing import Protocol

from lorad.box.config import Config
from lorad.client.client import Client
from lorad.tui.acknowledged import Acknowledged
from lorad.tui.feed import Feed
from lorad.tui.watch import BoxWatch


class AppPort(Protocol):
    """The application as its screens see it: `cast(AppPort, self.app)`.

    client: asks the daemon of the box that is shown.
    box: the name of that box in the titles; "" as long as there is only this machine.
    boxes: knows the states of all boxes, while a screen shows them.
    acknowledged: knows whose alarms the user has acknowledged, on all boxes.
    frozen: the screens are not refreshed for now.
    """

    client: Client
    box: str
    config: Config
    feed: Feed
    boxes: BoxWatch
    acknowledged: Acknowledged
    readonly: bool
    frozen: bool

    def may_act(self, owner: str | None) -> bool:
        """Whether the user may change what belongs to `owner`; the daemon has the last word."""

    def open_run(self, run: str, others: Sequence[str] = (), tab: str = "") -> None:
        """Open a tab of the screen of a run, the first one for "", with the curves of others over its own."""

    def narrow(self, filter_text: str) -> None:
        """Show the dashboard with the runs that match a filter."""

    def show_box(self, name: str, run: str = "") -> object:
        """Show the dashboard of another box, once it answers, and a run; `here`, `local`: this machine."""

    def use_theme(self, name: str) -> None: ...

    def exit(self) -> None: ...

    def open(self, screen: str, about: str | None = None) -> None:
        """Open one of the `SCREENS`. about: its pool or device, or the run with whose spec a form begins."""
