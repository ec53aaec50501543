"""The base class of the tabs of the run's screen."""

import shlex
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.containers import Vertical
from textual.widgets import Input

from lorad.client.client import Client
from lorad.records.runs import RunDetails
from lorad.tui.actions.table import opens
from lorad.tui.feed import Changes

if TYPE_CHECKING:
    from lorad.tui.screens.base import Base


class RunTab(Vertical):
    """Reads and shows one kind of facts about a run, while it is in front.

    `read` is called on the feed's thread, and with `changes.everything` when the tab comes to the front; what
    it keeps to know how far it read, nobody else touches.
    """

    TITLE: ClassVar[str]

    def __init__(self, run: str) -> None:
        super().__init__(id=self.TITLE)
        self.run_name = run

    @property
    def base(self) -> "Base":
        """Return the screen that the tab is on."""
        return cast("Base", self.screen)

    def read(self, client: Client, changes: Changes, run: RunDetails) -> Any | None:
        """Return what to show, or None when nothing in it changed. run: as `Client.show` returned it."""
        raise NotImplementedError

    def show(self, data: Any) -> None:
        """Draw what `read` returned."""
        raise NotImplementedError

    def focus_first(self) -> None:
        """Give the focus to the first widget that can have it."""
        for widget in self.query("*"):
            if widget.can_focus and widget.display:
                widget.focus()
                return

    def command(self) -> str:
        """Return the shell's way to what the tab shows."""
        return f"lorad show {shlex.quote(self.run_name)}"

    def targets(self, on: str) -> list[str]:
        """Return what an action on other things than the run would act on; see `Base.targets`."""
        return []

    def preset(self, verb: str, target: str) -> dict[str, str]:
        return {}


class FilteredTab(RunTab):
    """A tab with a field below what it shows; what is typed there filters it."""

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        self.screen.set_focus(field)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable `unfilter` when there is no filter, so that escape leads back as everywhere."""
        return self.query_one(Input).display if action == "unfilter" else opens(self.screen, action)

    def action_unfilter(self) -> None:
        field = self.query_one(Input)
        field.value = ""
        field.display = False
        self.focus_first()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        event.input.display = bool(event.value)
        self.focus_first()
