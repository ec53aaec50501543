"""Guard each verb of the reconcile loop and each of its items, so that trouble with one holds up no other."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.troubles import Item, Trouble
from lorad.errors import LoradError
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

T = TypeVar("T")
P = ParamSpec("P")


def of_run(run: RunRow) -> Item:
    return Item(f"run {run.name}", run.owner_uid)


def of_pool(pool: Pool) -> Item:
    return Item(f"pool {pool.id}", pool.setup.owner)


def guarded(
    ctx: Context,
    item: Item,
    verb: Callable[Concatenate[Context, P], None],
    *args: P.args,
    **options: P.kwargs,
) -> None:
    """Do `verb`. What goes wrong is kept as a trouble and tried again in the next pass; it is logged once."""
    try:
        verb(ctx, *args, **options)
    except Exception as error:
        hint = ""
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, LoradError):
            hint = error.hint
            words = error.message
        elif isinstance(error, OSError) and error.strerror:
            words = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        trouble = Trouble(verb.__name__, item, words, hint)
        before = ctx.loop.troubles.get((verb.__name__, item.name))
        ctx.loop.troubles[verb.__name__, item.name] = trouble
        if before != trouble:
            name = verb.__name__.lstrip("_")
            where = f"{name}, {item.name}" if item.name else name
            log.error("%s: %s", where, error, exc_info=not isinstance(error, LoradError))
    else:
        ctx.loop.troubles.pop((verb.__name__, item.name), None)


def each(
    ctx: Context,
    verb: Callable[[Context, T], None],
    items: Iterable[T],
    item_of: Callable[[T], Item],
    *,
    seconds: float = math.inf,
) -> None:
    """Do `verb` to every item, each guarded alone.

    seconds: after them no item is begun; the next pass, which comes at once, does the rest. With such a limit
        items that failed before come last.
    """
    until = time.monotonic() + seconds
    troubles = ctx.loop.troubles
    name = verb.__name__
    named = [(item_of(thing), thing) for thing in items]
    if seconds < math.inf:
        named.sort(key=lambda pair: (name, pair[0].name) in troubles)
    for item, thing in named:
        if time.monotonic() > until:
            ctx.loop.poke()
            break
        guarded(ctx, item, verb, thing)
    present = {item.name for item, _ in named} | {""}
    for key in [key for key in troubles if key[0] == name and key[1] not in present]:
        del troubles[key]  # of an item that is gone
