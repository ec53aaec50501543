"""What the daemon could not do in the last pass of its loop and tries again.

`lorad doctor`, `lorad daemon status`, `lorad list` and the dashboard show it. A verb that works on items (runs, pools,
gateways, users) does so by `each`: what is wrong with one item holds up no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

from lorad.errors import LoradError

if TYPE_CHECKING:
    from lorad.daemon.context import Context
    from lorad.daemon.pool import Pool
    from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

T = TypeVar("T")
P = ParamSpec("P")


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
        found = [trouble for trouble in self._there.values() if uid is None or trouble.item.owner == uid]
        return list(dict.fromkeys(trouble.line for trouble in found))

    def add(self, trouble: Trouble) -> bool:
        """Check whether it is new, or another one than before."""
        key = trouble.verb, trouble.item.name
        before, self._there[key] = self._there.get(key), trouble
        return before != trouble

    def end(self, verb: str, item: str = "") -> None:
        self._there.pop((verb, item), None)

    def keep_only(self, verb: str, items: set[str]) -> None:
        """Forget what `verb` could not do for items that are gone."""
        gone = [key for key in self._there if key[0] == verb and key[1] not in items]
        for key in gone:
            del self._there[key]


def of_run(run: RunRow) -> Item:
    return Item(f"run {run.name}", run.owner_uid)


def of_pool(pool: Pool) -> Item:
    return Item(f"pool {pool.id}", pool.setup.owner)


def guarded(
    ctx: Context, item: Item, verb: Callable[Concatenate[Context, P], None], *args: P.args, **options: P.kwargs
) -> None:
    """Whatever goes wrong is kept as a trouble, and is tried again in the next pass; the log has it once."""
    try:
        verb(ctx, *args, **options)
    except Exception as error:
        hint = error.hint if isinstance(error, LoradError) else ""
        if ctx.loop.troubles.add(Trouble(verb.__name__, item, in_words(error), hint)):
            where = f"{verb.__name__}, {item.name}" if item.name else verb.__name__
            log.error("%s: %s", where, error, exc_info=not isinstance(error, LoradError))
    else:
        ctx.loop.troubles.end(verb.__name__, item.name)


def each(ctx: Context, verb: Callable[[Context, T], None], items: Iterable[T], item_of: Callable[[T], Item]) -> None:
    """Do `verb` to every item, each guarded alone."""
    there = set()
    for one in items:
        item = item_of(one)
        there.add(item.name)
        guarded(ctx, item, verb, one)
    ctx.loop.troubles.keep_only(verb.__name__, there | {""})


def in_words(error: Exception) -> str:
    if isinstance(error, LoradError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
