"""Durable, immutable directories: whole or not there, and every byte accounted for.

Files are written into `.tmp-<name>-<uuid>` beside the final place, `manifest.json` last; then files and the
directory are synced, the directory is renamed, and its parent is synced. A crash at any point leaves the old
state and a leftover that `sweep` removes.
"""

import contextlib
import errno
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.bounds import CONFIG_BYTES
from lorad.errors import Conflict, IntegrityError, StorageError
from lorad.files import fsync, open_file, read_file, remove_tree

MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


class FileFact(Struct, frozen=True):
    """What the manifest says of a file; sha256 is in hex."""

    sha256: str
    bytes: int


class _Manifest(Struct, frozen=True):
    """The files of a directory with their digests, and the writer's notes."""

    files: dict[str, FileFact]  # by their path below the directory, without the manifest itself
    facts: dict[str, Any]  # the writer's notes
    sha256: str = ""  # of `files` and `facts`, so that a damaged manifest is detected

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file as it is on disk now; "" when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def write_directory(
    final: Path,
    write: Callable[[Path], Mapping[str, FileFact] | None],
    facts: Mapping[str, Any] | None = None,
) -> _Manifest:
    """Make `final`, with what `write` puts into its temporary directory.

    Files whose facts `write` returns, by the bytes that it wrote, are not read again. Raises Conflict
    when `final` exists, StorageError when the disk fails, and what `write` raises; then nothing is left.
    """
    temporary = begin(final)
    try:
        with _storage(final):
            facts_of_files = write(temporary)
        return commit(temporary, final, facts, facts_of_files)
    except BaseException:
        discard(temporary)
        raise


def begin(final: Path) -> Path:
    """Make a new empty directory beside `final` to write into; end it with `commit` or `discard`."""
    _refuse_existing(final)
    temporary = final.parent / f"{TEMPORARY}{final.name}-{uuid.uuid4().hex[:12]}"
    with _storage(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    return temporary


def commit(
    temporary: Path,
    final: Path,
    facts: Mapping[str, Any] | None = None,
    hashed: Mapping[str, FileFact] | None = None,
) -> _Manifest:
    """Make `temporary` durable and turn it into `final`. Files that were `hashed` are not read again.

    Raises Conflict, StorageError; `temporary` stays then.
    """
    _refuse_existing(final)
    with _storage(final):
        names, directories = _walk(temporary)
        facts_of_files = hashed or {}
        files = {name: facts_of_files.get(name) or _fact(temporary / name) for name in sorted(names)}
        manifest = _seal(temporary, files, dict(facts or {}))
        for name in (*names, MANIFEST, *directories):
            fsync(temporary / name)
        temporary.rename(final)
        fsync(final.parent)
    return manifest


def discard(temporary: Path) -> None:
    """Remove what `begin` made."""
    remove_tree(temporary)


def read_manifest(directory: Path) -> _Manifest:
    """Read the manifest of a directory. Raises IntegrityError when it is missing or damaged."""
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(read_file(path, CONFIG_BYTES, links=False), type=_Manifest)
    except OSError as error:
        raise IntegrityError(f"{path}: not readable: {error.strerror}", hint=_ELSEWHERE) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged: {error}", hint=_ELSEWHERE) from error
    if _sealed(manifest.files, manifest.facts).sha256 != manifest.sha256:
        raise IntegrityError(f"{path}: damaged: it does not have its own sha256", hint=_ELSEWHERE)
    return manifest


def verify(directory: Path) -> Mapping[str, FileFact]:
    """Hash every file again, and return its facts.

    Raises IntegrityError, which names the first file that is missing, changed or unknown.
    """
    manifest = read_manifest(directory)
    on_disk = set(_walk(directory)[0]) - {MANIFEST}
    for name, fact in manifest.files.items():
        if name not in on_disk:
            raise IntegrityError(f"{directory / name}: missing", hint=_ELSEWHERE)
        if (present := _fact(directory / name, fact.bytes)) != fact:
            change = f"changed bytes: sha256 {present.sha256}, not {fact.sha256}"
            if present.bytes != fact.bytes:
                change = f"{present.bytes} bytes instead of {fact.bytes}"
            raise IntegrityError(f"{directory / name}: {change}", hint=_ELSEWHERE)
    for name in sorted(on_disk - set(manifest.files)):
        raise IntegrityError(
            f"{directory / name}: not in {MANIFEST}", hint="Move it away; these directories are immutable."
        )
    return manifest.files


def amend(directory: Path, name: str, content: bytes) -> None:
    """Replace a file of a copy that nobody else has yet, in its manifest too. Raises StorageError."""
    manifest = read_manifest(directory)
    with _storage(directory / name):
        (directory / name).write_bytes(content)
        _seal(directory, {**manifest.files, name: _fact(directory / name)}, manifest.facts)
        fsync(directory / name)
        fsync(directory / MANIFEST)


def sweep(parent: Path) -> list[Path]:
    """Remove and return the leftovers of dead writers; only while nobody writes under `parent`."""
    leftovers = sorted(parent.glob(f"{TEMPORARY}*"))
    for leftover in leftovers:
        discard(leftover)
    return leftovers


_ELSEWHERE = "Use another one: `lorad adapters RUN` and `lorad checkpoints RUN` show what there is."


def _seal(directory: Path, files: dict[str, FileFact], facts: dict[str, Any]) -> _Manifest:
    manifest = _sealed(files, facts)
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return manifest


def _sealed(files: dict[str, FileFact], facts: dict[str, Any]) -> _Manifest:
    content = msgspec.json.encode([files, facts], order="deterministic")
    return _Manifest(files=files, facts=facts, sha256=hashlib.sha256(content).hexdigest())


def _walk(directory: Path) -> tuple[list[str], list[str]]:
    """Return the relative paths of the files and directories below, the directory itself (".") last.

    Raises IntegrityError for a link, which would escape the manifest.
    """
    files = []
    directories = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                files.append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                below = _walk(directory / entry.name)
                files += [f"{entry.name}/{name}" for name in below[0]]
                directories += [f"{entry.name}/{name}" for name in below[1]]
            else:
                problem = f"{entry.path}: neither a file nor a directory"
                raise IntegrityError(problem, hint="Replace it by the file itself.")
    return files, [*directories, "."]


def _fact(path: Path, expected: int | None = None) -> FileFact:
    """Return a file's size and digest; a file of another size than `expected` is not read, and has none."""
    with open_file(path, links=False) as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected:
            return FileFact(sha256="", bytes=size)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFact(sha256=digest, bytes=file.tell())


def _refuse_existing(final: Path) -> None:
    if os.path.lexists(final):
        raise Conflict(
            f"{final} exists already and is never replaced", hint="Choose another name, or remove it first."
        )


@contextlib.contextmanager
def _storage(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = _FULL.get(error.errno or 0, error.strerror or str(error))
        hint = (
            "Free some space (`lorad rm` deletes a run)"
            if error.errno in _FULL
            else "Check the directory and its mode"
        )
        raise StorageError(
            f"{final} could not be written: {reason}",
            hint=f"{hint}, or set `storage` in config.yaml; then resume.",
        ) from error
