"""What the pool writes for the ranks of its trainer, where they find it, and the environment they run in."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

import lorad
from lorad.box.paths import private_directory
from lorad.trainers.ranks import launch
from lorad.trainers.sharded.body import BodySettings

_REFUSAL = "refusal.json"
"""Beside the configuration: why a rank could not begin, as in `lorad.errors.to_wire`."""

FAILED = "failed"  # what a rank says of itself in the log, before the trace of what ended it


class RanksConfig(Struct, frozen=True, kw_only=True):
    """What the ranks of a trainer read when they start.

    Attributes:
        meeting: `file://` and a path where nothing is yet; or `tcp://` and rank 0's IP. It binds a port there
            and tells the pool, which tells all machines in `meeting_file`.
    """

    python: str
    ranks: int
    first: int = 0  # the first rank of this machine
    here: int | None = None  # how many ranks this machine has; None: all
    body: str  # a `module:function` that makes a `Body` of its settings
    settings: BodySettings
    devices: tuple[str, ...]  # by rank, in the place of the settings' device
    name: str  # the base's name in configurations of adapters
    threads: int  # of each rank
    socket: str  # to which rank 0 connects
    meeting: str


def refusal_file(config: Path) -> Path:
    return config.with_name(_REFUSAL)


def meeting_file(config: Path) -> Path:
    """Return the file beside the configuration with the host:port at which ranks of several machines meet."""
    return config.with_name("meeting")


def beat_file(config: Path, rank: int) -> Path:
    """Return the rank's heartbeat, beside the configuration."""
    return config.with_name(f"rank-{rank}.heartbeat")


class TrainerDirectories:
    """The directories and files of a trainer on one machine.

    Args:
        work, logs: See `RemoteTrainer.start`.

    Attributes:
        private: A directory of mode 0700, with a short name, for what belongs to the present life.
        python: A directory that holds lorad without its dependencies, which the ranks' own environment has.
        command: The command that starts the ranks.
    """

    def __init__(self, work: Path, logs: Path) -> None:
        self.record = work / "trainer.json"
        self.log = logs / "trainer.log"
        self.private = private_directory(work / "trainer")
        self.config = self.private / "config.json"
        self.socket = self.private / "pool.sock"
        self.meeting = self.private / "meeting"
        self.python = self.private / "python"
        self.temporary = self.private / "tmp"
        self.command = [sys.executable, "-I", "-S", launch.__file__, str(self.config)]

    def make(self) -> None:
        self.clear()
        for directory in (self.private, self.python, self.temporary):
            directory.mkdir(mode=0o700)
        (self.python / "lorad").symlink_to(Path(lorad.__file__).parent)

    def clear(self) -> None:
        shutil.rmtree(self.private, ignore_errors=True)

    def environment(self, added: Mapping[str, str], devices: Sequence[str], threads: int) -> dict[str, str]:
        """Return the environment of the ranks. The backend's `added` may replace all but the devices."""
        # the driver names `cuda:0`, … otherwise: they are counted among the devices that this process sees
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        indexes = [int(device.partition(":")[2] or 0) for device in devices if device != "cpu"]
        visible = [seen[index] if index < len(seen) else str(index) for index in indexes]
        return environment_of(added, visible, threads, python=self.python, temporary=self.temporary)


def environment_of(
    added: Mapping[str, str], devices: Sequence[str], threads: int, *, python: Path, temporary: Path
) -> dict[str, str]:
    """Return the environment of one machine's ranks, where `python` holds lorad.

    devices: The devices as the driver names them.
    """
    paths = [str(python), *filter(None, [added.get("PYTHONPATH")])]
    return {
        # A path that does not exist is asked of the hub.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # micro-batches differ in length, and would leave holes
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TMPDIR": str(temporary),
        **added,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
    }
