"""What the daemon could not do in the last pass of its loop and tries again.

`lorad doctor`, `lorad daemon status`, `lorad list` and the dashboard show it.
"""

from typing import NamedTuple


class Item(NamedTuple):
    """What a trouble is about.

    name: `run a`, `pool tiny-1`, or "" for the whole daemon.
    owner: the id of its user.
    """

    name: str = ""
    owner: int | None = None


class Trouble(NamedTuple):
    """Something that failed.

    verb: the function that failed.
    says: what was wrong and where, as a sentence.
    hint: what to do.
    """

    verb: str
    item: Item
    says: str
    hint: str = ""

    @property
    def line(self) -> str:
        where = f"{self.item.name}: " if self.item.name else ""
        return f"{where}{self.says}" + (f". {self.hint}" if self.hint else "")


class Troubles(dict[tuple[str, str], Trouble]):
    """The troubles that exist now, by verb and item."""

    def lines(self, uid: int | None = None) -> list[str]:
        """List each sentence once.

        uid: only troubles about what this user owns; None for all.
        """
        shown = [trouble for trouble in self.values() if uid is None or trouble.item.owner == uid]
        return list(dict.fromkeys(trouble.line for trouble in shown))

    def of(self, item: str) -> str:
        """Return the first sentence about an item; "" where there is none."""
        return next((trouble.says for (_, name), trouble in self.items() if name == item), "")
