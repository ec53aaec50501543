"""Verbs of the reconcile loop, each guarded alone: what is wrong with one item holds up no other."""

from __future__ import annotations

import logging
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
    """Whatever goes wrong is kept as a trouble, and is tried again in the next pass; the log has it once."""
    try:
        verb(ctx, *args, **options)
    except Exception as error:
        hint = error.hint if isinstance(error, LoradError) else ""
        if ctx.loop.troubles.add(Trouble(verb.__name__, item, _in_words(error), hint)):
            where = f"{verb.__name__}, {item.name}" if item.name else verb.__name__
            log.error("%s: %s", where, error, exc_info=not isinstance(error, LoradError))
    else:
        ctx.loop.troubles.end(verb.__name__, item.name)


def each(
    ctx: Context, verb: Callable[[Context, T], None], items: Iterable[T], item_of: Callable[[T], Item]
) -> None:
    """Do `verb` to every item, each guarded alone."""
    there = set()
    for one in items:
        item = item_of(one)
        there.add(item.name)
        guarded(ctx, item, verb, one)
    ctx.loop.troubles.keep_only(verb.__name__, there | {""})


def _in_words(error: Exception) -> str:
    if isinstance(error, LoradError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
