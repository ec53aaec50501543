"""Engines in whose way from a version to its server something goes wrong without a word.

A pool takes one by `backends.<kind>.engine` of config.yaml: it is a fault of the test, none that lorad has a
switch for.
"""

import re
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from lorad.adapters.adapter import Adapter
from lorad.engines.base import AdapterSource
from lorad.engines.remote.holdings import Holdings
from lorad.engines.sglang.dialect import SglangEngine
from lorad.engines.vllm.dialect import VllmEngine

_received = Holdings._received


def _plant(change: Callable[[Adapter], Adapter]) -> None:
    """Change what this process sends to servers."""

    def received(self: Holdings, source: AdapterSource) -> Adapter:
        return change(_received(self, source))

    Holdings._received = received  # type: ignore[method-assign]


def _of(adapter: Adapter, modules: dict[str, str]) -> Adapter:
    """Return what an adapter does to some modules, under other names."""
    tensors = {
        f"{name}.lora_{half}.weight": adapter.tensors[f"{module}.lora_{half}.weight"]
        for module, name in modules.items()
        for half in "AB"
    }
    config = replace(adapter.config, modules=tuple(sorted(modules.values())))
    return Adapter(config, dict(sorted(tensors.items())))


class OtherNames(VllmEngine):
    """Names modules as the class of the language model alone does: `model.layers…`, where the files have
    `model.language_model.layers…`.
    """

    @classmethod
    async def open(cls, *setup: Any, **more: Any) -> "OtherNames":
        _plant(lambda form: _of(form, {m: m.replace("language_model.", "", 1) for m in form.config.modules}))
        return await super().open(*setup, **more)


class LongerNames(VllmEngine):
    """The same the other way round, on a language model that is nobody's part."""

    @classmethod
    async def open(cls, *setup: Any, **more: Any) -> "LongerNames":
        _plant(lambda form: _of(form, {m: f"model.language_{m}" for m in form.config.modules}))
        return await super().open(*setup, **more)


class _Drops:
    """Leaves out the modules that `pattern` matches."""

    pattern = ""

    @classmethod
    async def open(cls, *setup: Any, **more: Any) -> Any:
        _plant(lambda form: _of(form, {m: m for m in form.config.modules if not re.search(cls.pattern, m)}))
        return await super().open(*setup, **more)  # type: ignore[misc]


class DropsOne(_Drops, SglangEngine):
    pattern = r"layers\.1\..*o_proj"
