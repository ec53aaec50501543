"""The environments that come with lorad, by name. `lorad/rl/tasks.py` has the data of the same name."""

from collections.abc import Callable

from lorad.envs.lookup import Lookup
from lorad.envs.protocol import Env

BUILTIN: dict[str, Callable[..., Env]] = {"lookup": Lookup}
