"""Where rows that were made ready lie, so that the next attempt on the same data begins at once.

A file is found by the content of all that it follows from: the data, the tokenizer and its template, the
settings, and lorad's own code and libraries. It is its user's alone, in a directory of that user's; the
oldest go when all of them take more than `KEPT_BYTES`.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from lorad.bounds import KEPT_BYTES
from lorad.box.paths import default_home
from lorad.files import expanded, open_file
from lorad.rl.kept.rows import Kept, KeptRows, RowFacts
from lorad.rl.sources import SUFFIXES, tell
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data, Sources, names_of

_PARALLEL = "TOKENIZERS_PARALLELISM"
_LEAST = 4 << 20  # bytes of data that are worth a file
_AT_ONCE = 1 << 22
_ABANDONED = 3600.0  # seconds after which nobody writes to a file any more
# settings that rows do not follow from
_NOT_READ = ("shuffle", "buffer", "prompts_per_step", "streaming", "eval")


class CacheKey(Struct, frozen=True):
    """A key that finds rows that were made ready.

    text: The name of their file, without its ending.
    files: The files of the data, with their size, time and inode when the key was made.
    """

    text: str
    files: dict[Path, tuple[int, ...]]


def key_of(sources: Sources, data: Data, tokenizer: Tokenizer, cwd: Path, *about: str) -> CacheKey | None:
    """Return the key of rows and of the settings `about`; None for small data, and for other than files."""
    paths = [cwd / expanded(name) for name in names_of(sources)]
    if not all(path.suffix.lower() in SUFFIXES and path.is_file() for path in paths):
        return None
    looks = {path: _looks(path) for path in paths}
    if sum(size for size, *_ in looks.values()) < _LEAST:
        return None
    settings = {key: value for key, value in msgspec.to_builtins(data).items() if key not in _NOT_READ}
    digest = hashlib.sha256(
        msgspec.json.encode([_code(), tokenizer.digest, settings, about, [str(path) for path in paths]])
    )
    for path in paths:
        with open_file(path) as file:
            while part := file.read(_AT_ONCE):
                digest.update(part)
                tell(path.name, file.tell() >> 20, looks[path][0] >> 20, " MB")
    return CacheKey(digest.hexdigest(), looks)


def kept_rows(
    key: CacheKey | None, make: Callable[[], Iterator[Kept]], facts: Callable[[], RowFacts]
) -> tuple[KeptRows, RowFacts]:
    """Open the rows of a key, or `make` them, learn their `facts`, and keep both for the next attempt."""
    path = None
    if key is not None:
        with contextlib.suppress(OSError, RuntimeError):
            path = _place() / f"{key.text}.rows"
            if (opened := KeptRows.opened(path, key.text)) is not None:
                os.utime(path)
                return opened
    rows = KeptRows(_directory)
    try:
        with _all_cores():
            for sample in make():
                rows.add(sample)
        gathered = facts()
        if key is not None and path is not None and rows.is_large:
            is_unchanged = all(_looks(file) == looks for file, looks in key.files.items())
            with contextlib.suppress(OSError):
                if is_unchanged:
                    rows.publish(path, key.text, gathered)
                    _make_room(path.parent, path)
        return rows, gathered
    finally:
        rows.close()


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Let tokenizers use all cores within the block; the libraries read a variable."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLEL]
        else:
            os.environ[_PARALLEL] = before


def _make_room(directory: Path, newest: Path) -> None:
    """Delete the files that were used longest ago, until the others take no more than they may."""
    entries = [(path, path.lstat()) for path in directory.iterdir()]
    for path, looks in entries:
        if path.suffix == ".tmp" and looks.st_mtime < time.time() - _ABANDONED:
            path.unlink(missing_ok=True)
    files = sorted((looks.st_mtime, looks.st_size, path) for path, looks in entries if path.suffix == ".rows")
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= KEPT_BYTES:
            return
        if path != newest or size > KEPT_BYTES:
            path.unlink(missing_ok=True)
            total -= size


def _place() -> Path:
    """Return where a user's rows lie. Raises RuntimeError for a user without a home."""
    home = default_home()
    if not (home.is_dir() and home.stat().st_uid == os.geteuid()):  # of a daemon that others share
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "lorad"
    return home / "rows"


def _directory() -> Path | None:
    """Make a directory of this user's alone; None where none can be had."""
    with contextlib.suppress(OSError, RuntimeError):
        directory = _place()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        looks = directory.lstat()
        if stat.S_ISDIR(looks.st_mode) and looks.st_uid == os.geteuid() and not looks.st_mode & 0o077:
            return directory
    return None


def _looks(path: Path) -> tuple[int, ...]:
    stats = path.stat()
    return stats.st_size, stats.st_mtime_ns, stats.st_ino


@cache
def _code() -> str:
    """Return the digest of the code that makes rows ready, and the versions of its libraries."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    for name in ("transformers", "tokenizers", "jinja2", "pyarrow"):
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()
