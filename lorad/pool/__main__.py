"""Run one pool until SIGTERM or a shutdown call: `python -m lorad.pool POOL_DIR`.

Exit code 1 says that it could not start.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path

from lorad.box.paths import AttemptDir
from lorad.children.leftovers import living
from lorad.errors import LoradError
from lorad.pool import config as configuration
from lorad.pool.config import log_directory
from lorad.protocol.heartbeat import HEART
from lorad.protocol.pool_setup import PoolSetup
from lorad.protocol.structs import learn_structs
from lorad.startup import quick_imports

_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m lorad.pool POOL_DIR", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        root = Path(sys.argv[1]).absolute()
        HEART.start(AttemptDir(log_directory(root)).heartbeat)
        HEART.work("imports")
        HEART.tell("starting its pool")
        config = configuration.read(root)
        with quick_imports():
            _prepare(config)
            import torch

            torch.set_num_threads(config.threads)
            torch.set_num_interop_threads(1)
            from lorad.pool.host import run

        learn_structs()
        HEART.work("")  # from here on, the thread that computes says what is done
        with living(root):
            asyncio.run(run(config, root))
    except (LoradError, OSError) as error:
        hint = f" {error.hint}" if isinstance(error, LoradError) and error.hint else ""
        print(f"the pool could not start: {error}.{hint}", file=sys.stderr, flush=True)
        return 1
    return 0


def _prepare(config: PoolSetup) -> None:
    """Set what counts from the import of torch on: its threads, its allocator, and the path of the user's
    classes.

    Micro-batches differ in length, and would leave holes between blocks of a GPU's memory. Servers inherit
    the environment, and have allocators of their own.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(config.threads)
    if config.device != "cpu" and config.server is None and not os.environ.keys() & {*_ALLOCATORS}:
        os.environ[_ALLOCATORS[0]] = "expandable_segments:True"
    if config.pythonpath:
        sys.path[:0] = config.pythonpath.split(os.pathsep)


if __name__ == "__main__":
    sys.exit(main())
