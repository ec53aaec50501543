"""A limit of a backend, and the setup that it judges."""

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct

from lorad.adapters.adapter import AdapterConfig
from lorad.models.facts import ModelFacts


class BackendSetup(Struct, frozen=True, kw_only=True):
    """A trainer and an engine as a run asks for them, as far as that is known yet.

    trainer, engine: the names of the backends.
    rank: the adapter's, or 0.
    args: `trainer.backend_args`.
    mode: `pool.mode`.
    dtype: the numbers of the base.
    """

    trainer: str = "builtin"
    engine: str = "builtin"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    rank: int = 0
    args: dict[str, Any] = {}
    mode: str = "auto"
    quantize: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    has_critic: bool = False
    lora_type: str = "canonical_lora"
    model: ModelFacts | None = None
    adapter: AdapterConfig | None = None


class BackendLimit(NamedTuple):
    """Something that a backend cannot do.

    key: the key of the spec to blame.
    breaks: returns what is wrong with a setup, or something false, also where too little is known yet.
    why, hint: the words of the error, with `{s}` for the setup and `{it}` for what `breaks` returned.
    """

    key: str
    breaks: Callable[[BackendSetup], object]
    why: str
    hint: str
