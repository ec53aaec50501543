"""Run something just before a module is imported, or just after: for tests, in the interpreters of servers.

A server imports torch late or, in some of its processes, not at all: what is mended in a module must not
import it.
"""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Mends(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._name = name
        self._before = before
        self._after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path)  # also for those who only ask whether there is such a module
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._before()
            execute(module)
            self._after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def before_import(name: str, mend: Callable[[], None]) -> None:
    sys.meta_path.insert(0, _Mends(name, mend, lambda module: None))


def after_import(name: str, mend: Callable[[Any], None]) -> None:
    """Call `mend` with the module."""
    sys.meta_path.insert(0, _Mends(name, lambda: None, mend))
