"""What screens, tabs and widgets use of the application that shows them."""

from collections.abc import Sequence
from typing import Protocol

from lorad.box.config import Config
from lorad.client.client import Client
from lorad.tui.feed import Feed


class AppPort(Protocol):
    """The application as its screens see it: `cast(AppPort, self.app)`.

    frozen: the screens are not refreshed for now.
    """

    client: Client
    config: Config
    feed: Feed
    readonly: bool
    frozen: bool

    def may_act(self, owner: str | None) -> bool:
        """Whether the user may change what belongs to `owner`; the daemon has the last word."""

    def open_run(self, run: str, others: Sequence[str] = (), tab: str = "") -> None:
        """Open the screen of a run.

        others: runs whose curves are shown over its own.
        tab: the title of the tab that is shown first.
        """

    def narrow(self, filter_text: str) -> None:
        """Show the dashboard with the runs that match a filter."""

    def use_theme(self, name: str) -> None: ...

    def exit(self) -> None: ...

    def open(self, screen: str, about: str | None = None) -> None:
        """Open one of the `SCREENS`.

        Args:
            about: The pool or the device that it shows, or the run with whose spec the form begins.
        """
