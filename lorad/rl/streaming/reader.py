"""Rows of a file, or of a hub dataset that the library `datasets` streams, in order from any place on."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from lorad.errors import SpecError
from lorad.files import expanded
from lorad.protocol.heartbeat import HEART
from lorad.protocol.inputs import HASHED_BYTES
from lorad.rl.sources import HUB_FORM, SUFFIXES, Row, hub_library, hub_parts, open_data, read_rows
from lorad.rl.tasks import TASKS, split_of
from lorad.spec.data import GENERATED, Data, single

Place = dict[str, Any]  # as JSON
_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # seconds between attempts, of six requests each
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # of HTTP: worth another attempt
_AT_ONCE = 256  # rows, where one pass is read
_END_BYTES = 1 << 20
_LOOKED_AT = 64  # rows that are read at most for each held-out one


class Reader(Protocol):
    """One pass over the rows of a source, which can be begun at any place.

    identity: A text that says what a place belongs to; sources of equal rows say the same.
    """

    identity: str

    def read(self, n: int) -> list[Row]:
        """Return the next `n` rows, fewer at the end. Raises SpecError."""

    def place(self) -> Place:
        """Return where the next row is."""

    def seek(self, place: Place | None) -> None:
        """Go to a place; None is the beginning."""


def reader_of(source: str, split: str, cwd: Path) -> Reader:
    """Return a reader at the beginning of a source. Raises SpecError."""
    path = cwd / expanded(source)
    if path.suffix.lower() in SUFFIXES:
        return _FileReader(source, split, cwd)
    return _HubReader(source, *hub_parts(source, split, path))


class _FileReader:
    """A file on this machine."""

    def __init__(self, source: str, split: str, cwd: Path) -> None:
        self._arguments = source, split, cwd
        self._read = 0
        self._rows = read_rows(source, split, cwd)
        path = cwd / expanded(source)
        # the sha256 says what is in a file; of a large one size, mtime and the sha256 of both ends
        try:
            with open_data(path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size <= HASHED_BYTES:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                else:
                    digest = hashlib.sha256(file.read(_END_BYTES))
                    file.seek(-_END_BYTES, os.SEEK_END)
                    digest.update(file.read(_END_BYTES))
                    content = f"{stat.st_size} {stat.st_mtime_ns} {digest.hexdigest()}"
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}", key="data") from error
        self.identity = f"{Path(source).name} {content}"

    def read(self, n: int) -> list[Row]:
        rows = list(islice(self._rows, n))
        self._read += len(rows)
        return rows

    def place(self) -> Place:
        return {"rows": self._read}

    def seek(self, place: Place | None) -> None:
        self._read = place["rows"] if place else 0
        self._rows = islice(read_rows(*self._arguments), self._read, None)


class _HubReader:
    """A hub dataset, of one revision from its first row to its last."""

    def __init__(self, source: str, name: str, config: str | None, split: str, revision: str | None) -> None:
        """Open a dataset. Raises SpecError where it is unknown, or the package `datasets` is missing."""
        self._source = source
        self._name = name
        self._config = config
        self._split = split
        self._revision = revision
        self.identity = " ".join(filter(None, (name, config, split, revision)))
        self._read = 0
        self._place: Any = None
        self._tried(self._open, ())  # somebody waits

    def read(self, n: int) -> list[Row]:
        rows: list[Any] = self._tried(lambda: list(islice(self._rows, n)), _PAUSES, self._open)
        first = self._read + 1
        self._read += len(rows)
        self._place = json.loads(json.dumps(self._dataset.state_dict()))
        return [
            Row(number, f"{self._source}:{number}", dict(values)) for number, values in enumerate(rows, first)
        ]

    def place(self) -> Place:
        return {"rows": self._read, "state": self._place}

    def seek(self, place: Place | None) -> None:
        self._read, self._place = (place["rows"], place["state"]) if place else (0, None)
        self._tried(self._open, _PAUSES)

    def _open(self) -> None:
        datasets = hub_library(self._source)
        datasets.config.STREAMING_READ_MAX_RETRIES = 1  # of 5 s each, without a word
        datasets.config.STREAMING_READ_RETRY_INTERVAL = 0
        datasets.disable_progress_bars()
        self._revision = self._revision or newest_commit(self._name)
        dataset = datasets.load_dataset(
            self._name, self._config, split=self._split, revision=self._revision, streaming=True
        )
        if self._place is not None:
            dataset.load_state_dict(self._place)
        self._dataset = dataset
        self._rows: Iterator[Any] = iter(dataset)

    def _tried(
        self, work: Callable[[], Any], pauses: tuple[float, ...], again: Callable[[], None] | None = None
    ) -> Any:
        """Ask the hub; after a failure that may pass, wait, call `again`, ask once more. Raises SpecError."""
        failed: Exception | None = None
        for pause in (*pauses, None):
            try:
                with HEART.waits():
                    if failed is not None and again is not None:
                        again()
                    return work()
            except SpecError:
                raise
            except Exception as error:  # each kind of failure of the hub has its own class
                failed = error
                if pause is None or not _is_passing(error):
                    break
                print(f"{self._source}: {_words(error)}; again in {pause:g} s", flush=True)
                with HEART.waits():
                    time.sleep(pause)
        assert failed is not None
        tried = ""
        hint = f"Check name and network; the form is {HUB_FORM}, here {self._split}."
        if pauses and _is_passing(failed):
            tried = f" in {len(pauses) + 1} attempts"
            hint = "See whether the network works; resuming continues with the next row."
        raise SpecError(
            f"the hub dataset {self._source} could not be read{tried}, after row {self._read}: "
            f"{_words(failed)}",
            key="data",
            hint=hint,
        ) from failed


def eval_rows(data: Data, problems: int, cwd: Path) -> Iterator[Row] | None:
    """Yield the first rows to evaluate on, from data.eval, else the held-out ones of data.train.

    Returns None where data.eval is not read in this way. Raises SpecError.
    """
    if data.eval is None:
        looked = islice(_rows(reader_of(single(data.train), "train", cwd)), _LOOKED_AT * problems)
        return islice((row for row in looked if is_held_out(row, data)), problems)
    source = single(data.eval)
    if not source or source in TASKS or source.startswith(GENERATED):
        return None
    return islice(_rows(reader_of(source, "test", cwd)), problems)


def is_held_out(row: Row, data: Data) -> bool:
    """Return whether a row is one of the 1 in 16 held out of data.train, by its prompt if it has one."""
    said = row.values.get(data.prompt_key, row.values)
    return split_of(json.dumps(said, sort_keys=True, default=str)) == "test"


def _rows(reader: Reader) -> Iterator[Row]:
    while rows := reader.read(_AT_ONCE):
        yield from rows


def newest_commit(name: str) -> str | None:
    """Ask the hub for the newest commit of a dataset. Raises SpecError."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name).sha
    except Exception as error:
        problem = f"the hub does not show the dataset {name}: {_words(error)}"
        hint = f"Check name and network; the form is {HUB_FORM}."
        raise SpecError(problem, key="data", hint=hint) from error


def _is_passing(error: BaseException | None) -> bool:
    """Return whether another attempt may help, by an error and what led to it."""
    if error is None:
        return False
    code = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(code, int):
        return code in _PASSING
    if isinstance(error, FileNotFoundError | PermissionError | ValueError | KeyError):
        return _is_passing(error.__cause__)
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OfflineModeIsEnabled" in names:
        return False
    return bool(names & {"OSError", "TransportError", "ClientError"}) or _is_passing(error.__cause__)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
