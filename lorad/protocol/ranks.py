"""How to start a trainer that is made of processes of its own: what the daemon writes for the pool."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Size = Annotated[int, Meta(ge=1)]


class RanksSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to start the ranks; a part of `pool.json`.

    There are tp x pp x cp x dp ranks (no trainer takes cp yet); ep is inside of these.

    python: the interpreter of the virtual environment that the backend is installed in; "" is lorad's own.
    env: added to its environment.
    args: the user's own settings of the backend.
    """

    python: str = ""
    env: dict[str, str] = {}
    tp: Size = 1
    pp: Size = 1
    cp: Size = 1
    dp: Size = 1
    ep: Size = 1
    args: dict[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp
