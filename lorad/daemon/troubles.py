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


class Troubles:
    """The troubles that exist now, by verb and item."""

    def __init__(self) -> None:
        self._there: dict[tuple[str, str], Trouble] = {}

    def __len__(self) -> int:
        return len(self._there)

    def lines(self, uid: int | None = None) -> list[str]:
        """List each sentence once.

        uid: only troubles about what this user owns; None for all.
        """
        shown = [trouble for trouble in self._there.values() if uid is None or trouble.item.owner == uid]
        return list(dict.fromkeys(trouble.line for trouble in shown))

    def has(self, verb: str, item: str) -> bool:
        return (verb, item) in self._there

    def of(self, item: str) -> str:
        """Return the first sentence about an item; "" where there is none."""
        return next((trouble.says for (_, name), trouble in self._there.items() if name == item), "")

    def add(self, trouble: Trouble) -> bool:
        """Check whether it is new, or another one than before."""
        key = trouble.verb, trouble.item.name
        before = self._there.get(key)
        self._there[key] = trouble
        return before != trouble

    def end(self, verb: str, item: str = "") -> None:
        self._there.pop((verb, item), None)

    def keep_only(self, verb: str, items: set[str]) -> None:
        """Forget what `verb` could not do for items that are gone."""
        gone = [key for key in self._there if key[0] == verb and key[1] not in items]
        for key in gone:
            del self._there[key]
