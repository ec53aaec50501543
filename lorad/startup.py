"""How a process of lorad starts."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules without the garbage collector, and leave what they made out of its later passes.

    Modules live as long as the process. Walking over them again and again while more are imported, and once
    more when the process ends, costs a third of the start of a command, of the daemon and of a pool.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
