"""Writes to Weights & Biases: a W&B run for each segment, all of a run in one group, with the same steps.

W&B's client keeps the newest steps in its memory, and takes no step twice. So a life begins a segment anew:
an offline run gets a new directory, which replaces the earlier life's; online, the server drops the steps
that it has already.
"""

import shutil
import time
import zlib
from pathlib import Path
from typing import Any, Literal

from lorad.box.private import read_key
from lorad.loggers.builtin.wandb_file import is_whole
from lorad.loggers.logger import LoggedRun, Logger, Point, Segment, Settings

_WHOLE_SECONDS = 30.0
_POLL_SECONDS = 0.05


class _WandbSettings(Settings, frozen=True, kw_only=True):
    """The keys of `wandb`.

    Attributes:
        project: project in which the runs are.
        entity: team or user; null is the key's own.
        key_file: file that holds the API key, readable by its owner only; needed unless mode is offline.
        mode: online sends figures as they come; offline writes files, which `wandb sync` sends.
        dir: directory of these files, its path from / or ~ on; null is `wandb` in the home of lorad, in a
            daemon that several users share `~/lorad/wandb`.
        url: a server of your own.
    """

    project: str = "lorad"
    entity: str | None = None
    key_file: str | None = None
    mode: Literal["online", "offline"] = "online"
    dir: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if self.mode == "online" and self.key_file is None:
            raise ValueError("key_file is missing: a file with the API key, or mode: offline")


class Wandb(Logger):
    settings_type = _WandbSettings
    modules = ("wandb",)
    extra = "wandb"
    place = "dir"
    whole_segments = True

    def __init__(self, run: LoggedRun, settings: Any) -> None:
        super().__init__(run, settings)
        self._run: Any = None
        self._steps: set[int] = set()

    def begin(self, segment: Segment, after: int) -> None:
        import wandb

        settings = self.settings
        root = Path(settings.dir).expanduser() if settings.dir else self.run.directory
        root.mkdir(parents=True, exist_ok=True)
        name = f"{self.run.name}-r{segment.number}" if segment.number else self.run.name
        unique = f"{name}-{zlib.crc32(repr(self.run.born).encode()):08x}"
        if settings.mode == "offline":
            for earlier in root.glob(f"wandb/offline-run-*-{unique}"):
                shutil.rmtree(earlier)
        more: dict[str, Any] = {}
        if settings.key_file is not None:
            more["api_key"] = read_key(settings.key_file)
        if settings.url is not None:
            more["base_url"] = settings.url
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=unique,
            name=name,
            group=self.run.name,
            dir=str(root),
            mode=settings.mode,
            resume="allow" if settings.mode == "online" else None,
            reinit="create_new",
            config={**self.run.spec, "lorad": {"segment": segment.number, "from_step": segment.after}},
            settings=wandb.Settings(
                x_disable_stats=True,
                x_disable_meta=True,
                console="off",
                disable_git=True,
                disable_code=True,
                silent=True,
                finish_timeout=_WHOLE_SECONDS,
                finish_timeout_raises=True,
                **more,
            ),
        )

    def put(self, point: Point) -> None:
        self._run.log({**point.values, "_timestamp": point.at}, step=point.step)
        self._steps.add(point.step)

    def flush(self) -> None:
        """Do nothing: the next life puts again what is in the client's memory."""

    def close(self, reason: str = "") -> None:
        """Let go. Raises TimeoutError when the file of an offline run does not become whole."""
        if self._run is None:
            return
        directory = Path(self._run.settings.sync_dir)
        failed = reason in ("failed", "lost", "attestation_failed")
        self._run.finish(exit_code=int(failed))
        if self.settings.mode == "online":
            return
        until = time.monotonic() + _WHOLE_SECONDS
        while not all(is_whole(file, len(self._steps)) for file in directory.glob("*.wandb")):
            if time.monotonic() > until:
                raise TimeoutError(f"{directory} did not become whole")
            time.sleep(_POLL_SECONDS)
