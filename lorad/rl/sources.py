"""Rows of data files and hub datasets, each with the place that an error about it names."""

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from io import BufferedReader, TextIOWrapper
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lorad.bounds import ROW_BYTES
from lorad.box.memory import bounded_memory
from lorad.box.paths import checkout
from lorad.errors import SpecError
from lorad.files import expanded, open_file, refuse_sparse
from lorad.protocol.heartbeat import HEART
from lorad.rl.tasks import TASKS
from lorad.spec.data import Sources, labels_of

HUB_NAME = re.compile(
    r"(?P<explicit>hub:)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<parts>[\w.:\[\]%+-]+))?"
)
_BATCH = 1024  # rows that are unpacked at once
_TOLD = 256  # rows after which it is said how far reading is
_SHOWN = 30  # characters of a name that are said
SUFFIXES = (".jsonl", ".parquet", ".csv", ".json")  # of files that rows are read from
_OTHER_FILES = {
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), "It is compressed: unpack it."),
    **dict.fromkeys((".ndjson", ".jsonlines"), "One JSON object a line is .jsonl: rename it."),
    **dict.fromkeys((".tsv", ".txt", ".arrow"), "Write its rows as .jsonl, .parquet or .csv."),
}
"""What to do about files of other forms."""
_LIST = "A .json file is one list, [{…}, {…}]; one object a line is .jsonl: rename it."
_LINE = 'Each line is one object, {"prompt": …}; one list of all objects is .json.'
HUB_FORM = "hub:org/name[@revision][:config]:split"
_FORMS = f"a builtin task, a .jsonl, .parquet, .csv or .json file, or {HUB_FORM}"


class Row(Struct, frozen=True):
    """A row of data.

    number: Its place in the source, from 1.
    where: `file:number`.
    source: The source that it is from, where there are several.
    """

    number: int
    where: str
    values: dict[str, Any]
    source: str = ""

    @property
    def is_of_columns(self) -> bool:
        """Return whether its source, as Parquet, has each key in each row: null where a row lacks it."""
        name = self.where.rpartition(":")[0].lower()
        return not name.endswith((".jsonl", ".json", ".csv"))


def labelled(sources: Sources, read: Callable[[str], Iterator[Row]]) -> Iterator[Row]:
    """Yield the rows of each source. Raises SpecError, also for builtin tasks among several sources."""
    if isinstance(sources, str):
        yield from read(sources)
        return
    for name, label in labels_of(sources).items():
        if name in TASKS:
            raise SpecError(
                f"{name} is a builtin task, which has no rows to mix", key="data", hint="Name it alone."
            )
        for row in read(name):
            yield replace(row, source=label)


def read_rows(source: str, split: str, cwd: Path) -> Iterator[Row]:
    """Yield the rows of a file or of a hub dataset. Raises SpecError, at the latest at the bad row."""
    path = cwd / expanded(source)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        return _read_hub(source, split, path)
    open_data(path).close()
    readers = (_read_jsonl, _read_parquet, _read_csv, _read_json)
    return readers[SUFFIXES.index(suffix)](path)


def tell(name: str, done: int, total: int, unit: str = "") -> None:
    """Say how far the reading of a source is."""
    HEART.tell(f"reading {name[-_SHOWN:]} {done} of {total}{unit}")
    HEART.progress()


def open_data(path: Path) -> BufferedReader:
    """Open a file of data. Raises SpecError for what is no file, and for one that is mostly a hole."""
    try:
        with ExitStack() as stack:
            file = stack.enter_context(open_file(path))
            refuse_sparse(file, path)
            stack.pop_all()
            return file
    except PermissionError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        hint = "Relative paths start at the directory of the spec file."
        script = f"examples/{path.parent.name}.py"  # writes files of a folder of its name
        source = checkout()
        if source is not None and (source / script).is_file():
            hint += f" `python {script}` in the repository writes it."
        raise SpecError(f"there is no file {path}", key="data", hint=hint) from None
    except OSError as error:
        hint = "Give a file whose bytes are all on disk."
        raise SpecError(f"{path}: {error.strerror}", key="data", hint=hint) from None


def _lines(file: BufferedReader | TextIOWrapper, raw: BufferedReader, path: Path) -> Iterator[Any]:
    """Yield the lines of a file, which reads `raw` or is it.

    Raises SpecError for a line longer than any row, and for a file that grows meanwhile: it might never end.
    """
    size = os.fstat(raw.fileno()).st_size
    for number in count(1):
        if number % _TOLD == 0:
            tell(path.name, raw.tell() >> 20, size >> 20, " MB")
        line = file.readline(ROW_BYTES + 1)
        if len(line) > ROW_BYTES:
            problem = f"{path}:{number}: the line is longer than {ROW_BYTES >> 20} MiB"
            raise SpecError(problem, key="data", hint="Each line is one row.")
        if raw.tell() > size:
            raise SpecError(f"{path} grew while it was read", key="data", hint="Wait until it is written.")
        if not line:
            return
        yield line


def _read_jsonl(path: Path) -> Iterator[Row]:
    with open_data(path) as file:
        yield from json_lines(_lines(file, file, path), str(path))


def json_lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Yield the objects of the lines of `name`. Raises SpecError at the first that is none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            values = json.loads(line)
            if b"\\u" in line:  # half a surrogate pair is JSON but no text
                json.dumps(values, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} (char {error.pos})" if isinstance(error, json.JSONDecodeError) else error
            raise SpecError(
                f"{where}: not JSON: {why}", hint="Each line is one JSON object, in UTF-8."
            ) from error
        if not isinstance(values, dict):
            raise SpecError(f"{where}: not a JSON object", hint=_LINE)
        yield Row(number, where, values)


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the lines below the header; every value is text, and an empty one is absent."""
    try:
        with open_data(path) as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            csv.field_size_limit(ROW_BYTES)
            reader = csv.DictReader(_lines(file, raw, path), strict=True)
            for number, values in enumerate(reader, 1):
                if None in values or None in values.values():
                    problem = f"{path}:{reader.line_num}: not as many values as the header has columns"
                    raise SpecError(problem, hint="Quote values that contain a comma or a line break.")
                yield Row(number, f"{path}:{reader.line_num}", {k: v for k, v in values.items() if v != ""})
    except (csv.Error, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not readable as CSV: {error}", hint="Write it as UTF-8.") from error


def _read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of one list."""
    try:
        with open_data(path) as file, bounded_memory(str(path)):
            rows = json.loads(text := file.read())
            if b"\\u" in text:
                json.dumps(rows, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not JSON: {error}", hint=_LIST) from error
    if not isinstance(rows, list):
        raise SpecError(f"{path}: not a list of objects", hint=_LIST)
    for number, values in enumerate(rows, 1):
        if number % _TOLD == 0:
            tell(path.name, number, len(rows), " rows")
        if not isinstance(values, dict):
            raise SpecError(f"{path}:{number}: not a JSON object", hint='Each is one object, {"prompt": …}.')
        yield Row(number, f"{path}:{number}", values)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(_BATCH)
            while True:
                with bounded_memory(str(path)):
                    batch = next(batches, None)
                    rows = [] if batch is None else batch.to_pylist()
                if batch is None:
                    return
                tell(path.name, number, file.metadata.num_rows, " rows")
                for values in rows:
                    number += 1
                    yield Row(number, f"{path}:{number}", values)
    except (pyarrow.ArrowException, OSError) as error:
        raise SpecError(f"{path}: not readable as Parquet: {error}", hint="Write the file again.") from error


def hub_parts(source: str, split: str, path: Path) -> tuple[str, str | None, str, str | None]:
    """Return name, config, split and revision of a hub dataset; `split` where it names none.

    Raises SpecError for other sources, and where there is a file `path`.
    """
    match = HUB_NAME.fullmatch(source)
    if match is None or path.exists():
        problem = f"{source} is no task, no .jsonl, .parquet, .csv or .json file and no hub name"
        raise SpecError(problem, key="data", hint=_OTHER_FILES.get(path.suffix.lower(), f"Give {_FORMS}."))
    config, colon, chosen = (match["parts"] or "").rpartition(":")
    return match["name"], (config or None) if colon else None, chosen or split, match["revision"]


def _read_hub(source: str, split: str, path: Path) -> Iterator[Row]:
    name, config, chosen, revision = hub_parts(source, split, path)
    datasets = hub_library(source)
    try:
        rows = datasets.load_dataset(name, config, split=chosen, revision=revision)
    except Exception as error:  # each kind of failure of the hub has its own class
        problem = f"the hub dataset {source} could not be loaded: {type(error).__name__}: {error}"
        hint = f"check name and network, or download it; the form is {HUB_FORM}, here {chosen}"
        raise SpecError(problem, key="data", hint=hint) from error
    for number, values in enumerate(rows, 1):
        if number % _TOLD == 0:
            tell(source, number, len(rows), " rows")
        yield Row(number, f"{source}:{number}", dict(values))


def hub_library(source: str) -> Any:
    """Return the module `datasets`. Raises SpecError."""
    try:
        import datasets
    except ImportError as error:
        problem = f"{source} is a hub dataset and the package `datasets` is not installed"
        hint = 'pip install datasets (or "lorad[hub]"), or give a .jsonl or .parquet file'
        raise SpecError(problem, key="data", hint=hint) from error
    return datasets
