"""The keys at the bottom in one line; the footer of Textual has a widget for each, and makes all anew."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widget import Widget

from lorad.tui.actions.table import IDS

if TYPE_CHECKING:
    from textual.binding import ActiveBinding
    from textual.screen import Screen

_PLACES = ("shown", "spare", "kept")  # from left to right
_EDGE = "▏"  # before the key of the palette, which is at the right whatever else there is


@dataclass(frozen=True)
class _Key:
    key: str
    shown: str
    says: str
    works: bool
    place: str

    @property
    def width(self) -> int:
        return cell_len(self.shown) + 1 + cell_len(self.says)


class KeyBar(Widget):
    """Keys that work here and what they do, as far as they fit (see `Action.footer`); a click presses one."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"keybar--key", "keybar--says", "keybar--edge"}
    DEFAULT_CSS = """
    KeyBar {
        dock: bottom; height: 1; background: $footer-background; color: $footer-foreground;
        .keybar--key { color: $footer-key-foreground; background: $footer-key-background; text-style: bold; }
        .keybar--says { color: $footer-description-foreground; background: $footer-description-background; }
        .keybar--edge { color: $foreground 20%; }
    }
    """

    keys: tuple[_Key, ...] = ()
    palette: _Key | None = None

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self.changed)

    def changed(self, screen: "Screen[object]") -> None:
        if not screen.app.app_focus or screen is not self.screen:
            return
        active = screen.active_bindings
        by_action: dict[str, ActiveBinding] = {}
        for each in active.values():
            if each.binding.show:
                by_action.setdefault(each.binding.action, each)
        by_name = {each.binding.action.rpartition(".")[2]: each for each in active.values()}
        last = by_name.get("command_line") or by_name.get("command_palette")
        keys = tuple(sorted(map(self._key, by_action.values()), key=lambda key: _PLACES.index(key.place)))
        palette = self._key(last) if last else None
        if (keys, palette) != (self.keys, self.palette):
            self.keys = keys
            self.palette = palette
            self.refresh()

    def _key(self, active: "ActiveBinding") -> _Key:
        binding = active.binding
        display = self.app.get_key_display(binding)
        place = IDS[binding.id].footer if binding.id in IDS else "shown"
        return _Key(binding.key, display, binding.description, active.enabled, place)

    def placed(self) -> list[tuple[int, _Key]]:
        """Return the keys that fit and their columns; keys that are always shown get their room first."""
        placed: list[tuple[int, _Key]] = []
        room = self.size.width
        if self.palette and self.palette.width <= room:
            room -= self.palette.width
            placed.append((room, self.palette))
            room -= 1
        fitting = set[_Key]()
        for key in sorted(self.keys, key=lambda key: key.place != "kept"):
            if (room := room - key.width - bool(fitting)) < 0:
                break
            fitting.add(key)
        column = 0
        for key in self.keys:
            if key in fitting:
                placed.append((column, key))
                column += key.width + 1
        return sorted(placed, key=lambda each: each[0])

    def render(self) -> Text:
        key_style, says, edge = (
            self.get_component_rich_style(f"keybar--{part}") for part in ("key", "says", "edge")
        )
        line = Text(no_wrap=True)
        for column, key in self.placed():
            line.append(" " * (column - line.cell_len))
            if key is self.palette and column:
                line.right_crop(1)
                line.append(_EDGE, edge)
            begin = len(line)
            line.append(key.shown, key_style).append(f" {key.says}", says)
            if not key.works:
                line.stylize("dim", begin)
        return line

    def on_mouse_down(self, event: events.MouseDown) -> None:
        for column, key in self.placed():
            if column <= event.x < column + key.width:
                if key.works:
                    self.app.simulate_key(key.key)
                else:
                    self.app.bell()
