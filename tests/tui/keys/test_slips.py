"""A slip of a finger does no harm: acting keys stand alone, and what is lost is asked first."""

from collections.abc import Sequence

import pytest
from textual.binding import Binding, BindingType

from lorad.tui.actions.table import bindings
from lorad.tui.actions.verbs import VERBS
from lorad.tui.app import LoradApp
from lorad.tui.dashboard.screen import Dashboard
from lorad.tui.run.screen import TABS, RunScreen
from lorad.tui.screens.base import Base
from lorad.tui.serving.screen import Serving

_FRAME = [*LoradApp.BINDINGS, *Base.BINDINGS, *bindings("table", "log", "spec_text")]
VIEWS: dict[str, Sequence[BindingType]] = {
    "dashboard": [*_FRAME, *Dashboard.BINDINGS],
    "serving": [*_FRAME, *Serving.BINDINGS],
    "pool": [*_FRAME, *bindings("pool", "back", "pool_screen")],
    "device": [*_FRAME, *bindings("device", "back")],
    "nodes": [*_FRAME, *bindings("nodes", "back")],
    "bill": [*_FRAME, *bindings("bill", "back")],
    **{tab.TITLE: [*_FRAME, *RunScreen.BINDINGS, *tab.BINDINGS] for tab in TABS},
}
# Nothing is lost by these: what they change is changed back by the verb beside it, or they add something.
HARMLESS = {"pause", "pin", "fork", "export"}


def shifted(view: Sequence[BindingType]) -> list[str]:
    """List the keys that change something and have a neighbour with or without shift."""
    typed = {
        key: binding.action
        for binding in view
        if isinstance(binding, Binding)
        for key in binding.key.split(",")
    }
    acts = {key for key, action in typed.items() if "act('" in action or action == "acknowledge"}
    return sorted(key for key in acts if len(key) == 1 and key.swapcase() in typed)


@pytest.mark.parametrize("view", VIEWS)
def test_no_acting_key_is_one_shift_away(view: str) -> None:
    assert shifted(VIEWS[view]) == []


def test_actions_that_lose_something_ask_first() -> None:
    unasked = {name for name, verb in VERBS.items() if verb.lost is None and not verb.fields}
    assert unasked <= HARMLESS
