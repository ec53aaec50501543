"""Writes for TensorBoard: a directory for each run, in which every life and segment has its own event file.

A file begins with `SessionLog.START` at the first step to come, by which readers drop this step and later
ones of earlier files. Events are written by the caller's thread, without a queue.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from msgspec import Meta

from lorad.errors import SpecError
from lorad.files import fsync, write_whole
from lorad.loggers.logger import LoggedRun, Logger, Point, Segment, Settings

_MARK = ".lorad.json"  # whose directory it is


class _TensorboardSettings(Settings, frozen=True, kw_only=True):
    """The keys of `tensorboard`.

    Attributes:
        dir: directory in which each run has one of its own, its path from / or ~ on; null is `tensorboard` in
            the home of lorad, in a daemon that several users share `~/lorad/tensorboard`.
        samples: samples of each step that are shown as text.
    """

    dir: str | None = None
    samples: Annotated[int, Meta(ge=0, le=64)] = 0


class TensorBoard(Logger):
    settings_type = _TensorboardSettings
    modules = ("tensorboard",)
    extra = "tensorboard"
    place = "dir"

    def __init__(self, run: LoggedRun, settings: Any) -> None:
        super().__init__(run, settings)
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self.samples = int(settings.samples)

    def begin(self, segment: Segment, after: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        chosen = self.settings.dir
        root = Path(chosen).expanduser() if chosen else self.run.directory / "tensorboard"
        whose = {"run": self.run.name, "born": self.run.born}
        for number in range(1000):  # the directory of an earlier run of the same name is left alone
            directory = root / (self.run.name if number == 0 else f"{self.run.name}~{number}")
            directory.mkdir(parents=True, exist_ok=True)
            mark = directory / _MARK
            if not mark.exists():
                write_whole(mark, json.dumps(whose).encode())
            with contextlib.suppress(ValueError):
                if json.loads(mark.read_bytes()) == whose:
                    break
        else:
            raise SpecError(
                f"{root} holds 1000 directories of runs named {self.run.name}", hint="Remove old ones."
            )
        if segment.number == 0 and after < 0:  # all is put again
            for earlier in directory.glob("events.out.tfevents.*.lorad"):
                earlier.unlink()
        numbers = [int(path.name.split(".")[3]) for path in directory.glob("events.out.tfevents.*.lorad")]
        path = directory / f"events.out.tfevents.{max(numbers, default=-1) + 1:010d}.lorad"
        self._file = path.open("xb")
        self._writer = RecordWriter(self._file)
        now = time.time()
        start = SessionLog(status=SessionLog.START)
        for event in (
            Event(wall_time=now, file_version="brain.Event:2"),
            Event(wall_time=now, step=after + 1, session_log=start),
        ):
            self._writer.write(event.SerializeToString())
        fsync(directory)

    def put(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        for name, text in point.texts.items():  # for the page of texts
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
            metadata = create_summary_metadata(name, "")
            values.append(Summary.Value(tag=name, metadata=metadata, tensor=tensor))
        event = Event(wall_time=point.at, step=point.step, summary=Summary(value=values))
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, reason: str = "") -> None:
        if self._file is not None:
            self._file.close()
