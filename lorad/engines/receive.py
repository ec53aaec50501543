"""What every engine does before it loads an adapter: its bytes are those that were named, and it fits the
base.
"""

from __future__ import annotations

from collections.abc import Mapping

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import read_peft
from lorad.adapters.validate import validate
from lorad.engines.base import AdapterSource
from lorad.errors import AdapterRefused


def receive(source: AdapterSource, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> Adapter:
    """Return the adapter of a source. shapes: (out, in) of every linear of the base.

    Raises AdapterRefused when its sha256 is not `source.digest`, and when it does not fit.
    """
    if source.adapter is not None:
        adapter = source.adapter
    elif source.directory is not None:
        adapter = read_peft(source.directory)
    else:
        raise AdapterRefused("a source needs an adapter or a directory")
    digest = adapter.digest()
    if digest != source.digest:
        raise AdapterRefused(
            f"the adapter's sha256 is {digest}, not {source.digest}",
            hint="it was changed on its way: publish it again",
        )
    if adapter.config.rank > max_rank:
        raise AdapterRefused(
            f"rank {adapter.config.rank} exceeds {max_rank}, the most that this engine takes",
            hint="lower lora.rank",
        )
    validate(adapter, shapes)
    return adapter
