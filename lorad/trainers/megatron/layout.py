"""Where the numbers of a logical tensor lie in this rank's parameters, read off Bridge's own export.

Bridge knows how heads are interleaved and cut; nothing here repeats that. Exporting, in place of the weights,
the number of each row and then of each column says it all, once per kind of adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Index = slice | np.ndarray
Gather = Callable[[Sequence[Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Piece:
    """`parameter[rows, columns]` on this rank is `tensor[from_rows, from_columns]` of the logical one."""

    rows: Index
    columns: Index
    from_rows: Index
    from_columns: Index

    def copy(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        parameter[_grid(self.rows, self.columns)] = tensor[_grid(self.from_rows, self.from_columns)]


def discover(
    gather: Gather, shapes: Sequence[tuple[int, int]], holder: Mapping[str, int], rank: int
) -> dict[str, Piece]:
    """Logical name -> its piece here. shapes: of this rank's parameters, the same on all that cut them.
    holder: which of the parameters holds each logical tensor. rank: of this one among those. Collective.
    """
    rows = gather([_numbered(shape, rank, 0) for shape in shapes])
    columns = gather([_numbered(shape, rank, 1) for shape in shapes])
    return {
        name: _piece(rows[name].numpy(), columns[name].numpy(), shapes[number], rank)
        for name, number in holder.items()
    }


def _numbered(shape: tuple[int, int], rank: int, axis: int) -> Tensor:
    """fp32 holds these integers exactly: both numbers of a shape are far below 2**24."""
    line = torch.arange(shape[axis], dtype=torch.float32) + rank * shape[axis]
    return (line[:, None] if axis == 0 else line[None]).expand(shape).contiguous()


def _piece(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int], rank: int) -> Piece:
    here = rows.astype(np.int64) // shape[0] == rank
    from_rows, from_columns = np.flatnonzero(here.any(1)), np.flatnonzero(here.any(0))
    return Piece(
        rows=_short(rows[from_rows, from_columns[0]].astype(np.int64) % shape[0]),
        columns=_short(columns[from_rows[0], from_columns].astype(np.int64) % shape[1]),
        from_rows=_short(from_rows),
        from_columns=_short(from_columns),
    )


def _short(index: np.ndarray) -> Index:
    """Neighbours as a slice: most layouts are one."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if np.array_equal(index, np.arange(first, last + 1)) else index


def _grid(rows: Index, columns: Index) -> tuple[Index, Index]:
    if isinstance(rows, np.ndarray) and isinstance(columns, np.ndarray):
        return rows[:, None], columns[None]
    return rows, columns
