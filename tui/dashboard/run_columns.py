"""Which columns the table of runs has, how wide they are, and the file that remembers which were chosen."""

import dataclasses
from collections.abc import Iterable, Sequence

from msgspec import Struct

from lorad.client.columns import COLUMNS, is_key
from lorad.errors import NotAllowed
from lorad.tui.state_files import read_state, state_file, write_state
from lorad.tui.widgets.columns import TableColumn

USUAL = (
    *("name", "state", "step", "reward", "eval", "recent", "tok/s", "eta", "progress", "age", "owner"),
    *("version", "why"),
)
_KEYS = ("trainer.lr", "lora.rank", "lora.alpha", "algorithm.name", "kl", "loss", "entropy")
OFFERED = (*COLUMNS, *_KEYS)
_MOST = 40  # columns
FILE = "columns.json"
_SHAPES = {
    column.key: column
    for column in (
        TableColumn("name", 8, 40, 0, shrinks=16),
        TableColumn("state", 10, 23, 0, shrinks=12),
        TableColumn("step", 5, 15, 0, right=True),
        TableColumn("progress", 8, 8, 0),
        TableColumn("reward", 6, 22, 0, right=True),
        TableColumn("recent", 8, 24, 0),
        TableColumn("eval", 11, 15, 0),
        TableColumn("tok/s", 6, 8, 0, right=True),
        TableColumn("eta", 5, 7, 0, right=True),
        TableColumn("age", 4, 5, 0, right=True),
        TableColumn("version", 7, 8, 0),
        TableColumn("owner", 5, 14, 0),
        TableColumn("base", 6, 30, 0, shrinks=12),
        TableColumn("why", 14, 60, 0, rest=True),
        TableColumn("waiting", 14, 60, 0, shrinks=20),
        TableColumn("behind", 14, 60, 0, shrinks=20),
        TableColumn("note", 6, 40, 0, shrinks=12),
    )
}
_TEXTS = frozenset({"sweep", "group", "tags", "pool", "device", "origin", "reason", "starts"})
_UNORDERED = frozenset({"recent", "why", "waiting", "behind", "starts", "note", "tags"})


class _KeptColumns(Struct, frozen=True):
    columns: list[str]


def shaped(names: Iterable[str]) -> tuple[TableColumn, ...]:
    """Make the columns of these names. Where there is no room, the last ones go first."""
    columns = []
    for place, name in enumerate(names):
        usual = TableColumn(name, 4, 24, 0, right=name in COLUMNS and name not in _TEXTS, shrinks=12)
        shape = _SHAPES.get(name, usual)
        columns.append(dataclasses.replace(shape, leaves=place, orders=name not in _UNORDERED))
    return tuple(columns)


def remembered() -> tuple[Sequence[str], str]:
    """Read the columns that were chosen, else the usual ones; and what is wrong with the file, or ""."""
    path = state_file(FILE)
    try:
        kept = read_state(path, _KeptColumns).columns
    except FileNotFoundError:
        return USUAL, ""
    except OSError as error:
        return USUAL, f"{path} is not read: {error.strerror}. The usual columns are shown."
    except ValueError:
        return USUAL, f"{path} holds no columns: the usual ones are shown. c chooses others and mends it."
    unknown = next((name for name in kept if name not in OFFERED and not is_key(name)), None)
    if unknown is not None or len(kept) > _MOST:
        wrong = f"{unknown!r:.40} is no column" if unknown is not None else f"over {_MOST} columns"
        return USUAL, f"{path}: {wrong}. The usual ones are shown; c chooses others and mends it."
    return tuple(dict.fromkeys(["name", *kept])), ""


def remember(names: Sequence[str]) -> None:
    """Keep a choice; the usual columns need no file. Raises NotAllowed where it cannot be written."""
    path = state_file(FILE)
    try:
        if tuple(names) == USUAL:
            path.unlink(missing_ok=True)
            return
        write_state(path, _KeptColumns([*names]))
    except OSError as error:
        raise NotAllowed(
            f"The columns stay until this session ends: {path}: {error.strerror}.",
            hint="XDG_STATE_HOME names another directory.",
        ) from error
