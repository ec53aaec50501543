"""Points of a sweep in a file: CSV, JSON or YAML, each point as overrides."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lorad.errors import SpecError
from lorad.files import expanded
from lorad.spec.yaml import compose, plain

_SIZE_LIMIT = 1 << 20  # bytes
_HINT = (
    "A .csv has the keys in its first line, as in trainer.lr,lora.rank; .json and .yaml hold a list of "
    "points, as in [{trainer.lr: 1e-4, lora.rank: 8}]."
)


def dotted(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key, dotted, with its value; an empty section is a value."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def points_in(name: str) -> list[list[str]]:
    """Read the overrides of each point; an empty cell of a table leaves its key as the spec has it.

    Raises SpecError.
    """
    path = expanded(name)
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
            raise SpecError(f"{name}: larger than 1 MiB", hint=_HINT)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{name}: {reason}", hint=_HINT) from None
    points = []
    if path.suffix.lower() == ".csv":
        rows = csv.reader(io.StringIO(text))
        header = [key.strip() for key in next(rows, [])]
        if not all(header):
            raise SpecError(f"{name}:1: a column has no key", hint=_HINT)
        for row in filter(any, rows):
            if len(row) != len(header):
                place = f"{name}:{rows.line_num}"
                hint = "Quote a cell that has a comma."
                raise SpecError(f"{place}: {len(row)} cells under {len(header)} keys", hint=hint)
            cells = zip(header, map(str.strip, row), strict=True)
            points.append([f"{key}={cell}" for key, cell in cells if cell])
    else:
        node = compose(text, name)
        listed = None if node is None else plain(node, name)
        if not isinstance(listed, list) or not all(isinstance(point, dict) and point for point in listed):
            raise SpecError(f"{name}: not a list of points", hint=_HINT)
        for point in listed:
            points.append([f"{key}={json.dumps(v, ensure_ascii=False)}" for key, v in dotted(point)])
    if not points:
        raise SpecError(f"{name}: there is no point in it", hint=_HINT)
    return points
