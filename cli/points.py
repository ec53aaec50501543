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


def points_in(name: str) -> list[list[str]]:
    """Read the overrides of each point. Raises SpecError."""
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
    points = _of_csv(text, name) if path.suffix.lower() == ".csv" else _of_yaml(text, name)
    if not points:
        raise SpecError(f"{name}: there is no point in it", hint=_HINT)
    return points


def _of_csv(text: str, name: str) -> list[list[str]]:
    """Read a table; an empty cell leaves its key as the spec has it."""
    rows = csv.reader(io.StringIO(text))
    header = [key.strip() for key in next(rows, [])]
    if not all(header):
        raise SpecError(f"{name}:1: a column has no key", hint=_HINT)
    points = []
    for row in filter(any, rows):
        if len(row) != len(header):
            raise SpecError(
                f"{name}:{rows.line_num}: {len(row)} cells under {len(header)} keys",
                hint="Quote a cell that has a comma.",
            )
        points.append(
            [f"{key}={cell.strip()}" for key, cell in zip(header, row, strict=True) if cell.strip()]
        )
    return points


def _of_yaml(text: str, name: str) -> list[list[str]]:
    node = compose(text, name)
    data = None if node is None else plain(node, name)
    if not isinstance(data, list) or not all(isinstance(point, dict) and point for point in data):
        raise SpecError(f"{name}: not a list of points", hint=_HINT)
    return [
        [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in _flat(point, "")]
        for point in data
    ]


def _flat(point: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Name nested keys by dots; an empty mapping is a value."""
    for key, value in point.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
