"""A whole model made of a base and an adapter: W + scale * B A in every weight that the adapter changes, with
DoRA each of its rows at the length that its magnitude says.

The weight files of the base are copied and changed in place, a few rows at a time, so that memory does not
grow with the model; all other bytes stay those of the base. What was written is then read again and compared
with the base and the adapter, see `_check`. Imports no torch.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from lorad.adapters.adapter import MAGNITUDE, Adapter
from lorad.adapters.directory import MANIFEST, write_directory
from lorad.adapters.targets import HEAD, experts_of
from lorad.adapters.tensors import bfloat16_bits
from lorad.errors import Conflict, IntegrityError, SpecError, StorageError
from lorad.models.directory import INDEX, read_json, weight_files
from lorad.models.facts import TensorPlace, stored_tensors

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

# What else of a base is copied; code of a repository, pickles and other forms of the weights stay there.
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*")
_NOT_BESIDE = (MANIFEST, "adapter_config.json")  # of a base that lorad wrote, or that an adapter lies beside
_CHUNK = 16 << 20  # bytes
_ROWS_BYTES = 16 << 20  # of one weight in fp32 at a time
_SPARE = 64 << 20  # bytes of disk that stay free
# Half a unit in the last place, relative: what rounding to this dtype may cost one number.
_ROUNDING = {"F32": 2.0**-24, "BF16": 2.0**-8, "F16": 2.0**-11}
_TINIEST = {"F32": 1e-38, "BF16": 1e-38, "F16": 6e-8}  # of float16, steps below 6e-5 no longer shrink
_SLACK = 2.0**-20  # relative, for the product in fp32
_AGAIN = "Nothing was kept. Export again; `lorad verify` says whether the version is whole."


class Merged(NamedTuple):
    """What was written.

    Attributes:
        changed: How many weights differ from the base's.
        bytes: The bytes of all files.
        rounding: The rms of what rounding to the weights' dtype changed, over the rms of what the adapter
            adds.
    """

    changed: int
    bytes: int
    rounding: float


class _Target(NamedTuple):
    """A weight that the adapter changes, and the adapter's part of it in fp32: a [rank, in], b [out, rank]
    with the scale in it, and with DoRA the magnitude [out].
    """

    name: str
    path: Path
    place: TensorPlace
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None

    def lengthened(self, rows: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray | float]:
        """Return rows of W + scale * B A, from number `first` on, as the magnitude wants them, and by what
        each was multiplied for that.
        """
        if self.magnitude is None:
            return rows, 1.0
        c = self.magnitude[first : first + len(rows), None] / np.linalg.norm(rows, axis=1, keepdims=True)
        return rows * c, c


def write_merged(
    adapter: Adapter,
    base: Path,
    final: Path,
    extra: Callable[[Path], object],
    progress: Progress = lambda done, total: None,
) -> Merged:
    """Write base and adapter as one model into the new directory `final`, whole or not at all.

    Raises SpecError for a base that is quantized or has other weights than the adapter needs, Conflict when
    `final` exists, StorageError when the disk has no room, IntegrityError when what was read back is not what
    base and adapter give.

    Args:
        base: A whole directory, see `weight_files`.
        extra: Writes further files into the directory it gets, before it is sealed by its manifest.
        progress: Hears the bytes read and written so far.
    """
    files = weight_files(base)
    targets = list(_targets(adapter, base))
    weights = sum(path.stat().st_size for path in files)
    if final.exists():
        raise Conflict(f"{final} exists", hint="Choose another directory.")
    free = shutil.disk_usage(next(path for path in final.parents if path.is_dir())).free
    if free < weights + _SPARE:
        raise StorageError(
            f"{final}: the model needs {weights / 1e9:.2f} GB and {free / 1e9:.2f} GB are free",
            hint="Choose a directory on another disk, or make room.",
        )
    total = 2 * weights
    done = 0
    sums: list[np.ndarray] = []

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    def write(directory: Path) -> None:
        for path in files:
            with path.open("rb") as read, (directory / path.name).open("wb") as written:
                while chunk := read.read(_CHUNK):
                    written.write(chunk)
                    advance(len(chunk))
        for target in targets:
            with (directory / target.path.name).open("r+b") as file, target.path.open("rb") as source:
                for start, rows in _rows(source, target):
                    file.seek(target.place.start + start)
                    file.write(_merged(rows, target, start))
        for path in sorted({path for pattern in _BESIDE for path in base.glob(pattern)} - {*files}):
            is_left = path.name in _NOT_BESIDE or (path.name == INDEX and len(files) == 1)
            if path.is_file() and not is_left:
                shutil.copyfile(path, directory / path.name)
        extra(directory)
        for path in files:
            sums.append(_check(path, directory / path.name, [t for t in targets if t.path == path], advance))

    manifest = write_directory(final, write, {"merged": adapter.digest()})
    lost, added = np.sum(sums, axis=0)
    return Merged(len(targets), manifest.bytes, float(np.sqrt(lost / added)) if added else 0.0)


def _targets(adapter: Adapter, base: Path) -> Iterator[_Target]:
    """Find the weight of each module of the adapter. Raises SpecError."""
    config = read_json(base / "config.json")
    text = config.get("text_config") or {}
    if config.get("quantization_config") or text.get("quantization_config"):
        hint = "Export without --merge, and serve the adapter on the quantized base."
        raise SpecError(f"{base} is quantized: an adapter cannot be added to its weights", hint=hint)
    places = stored_tensors(base)
    for module in adapter.config.modules:
        name = f"{module}.weight"
        if name not in places:
            tied = module == HEAD and (config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
            why = "shares its weight with the embeddings" if tied else "is no weight of it"
            if (experts := experts_of(module)) and any(place.startswith(f"{experts}.") for place in places):
                why = f"is no weight of it, which has all of {experts} in one tensor"
            raise SpecError(f"{base}: {name} {why}", hint="Export without --merge.")
        path, place = places[name]
        a, b = (adapter.tensors[f"{module}.lora_{half}.weight"] for half in "AB")
        if place.dtype not in _ROUNDING:
            raise SpecError(f"{path}: {name} is {place.dtype}", hint="Export without --merge.")
        if place.shape != (b.shape[0], a.shape[1]):
            raise SpecError(
                f"{path}: {name} has shape {place.shape}, the adapter needs {(b.shape[0], a.shape[1])}",
                hint="Is this the base that the adapter was trained on?",
            )
        scaled = b * np.float32(adapter.config.scale_of(module))
        yield _Target(name, path, place, a, scaled, adapter.tensors.get(f"{module}.{MAGNITUDE}"))


def _rows(file: BinaryIO, target: _Target) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the tensor, bytes) of some whole rows at a time."""
    place = target.place
    row = (place.end - place.start) // place.shape[0]
    step = max(1, _ROWS_BYTES // (4 * place.shape[1])) * row
    for start in range(0, place.end - place.start, step):
        file.seek(place.start + start)
        yield start, file.read(min(step, place.end - place.start - start))


def _merged(rows: bytes, target: _Target, start: int) -> bytes:
    """Return these rows with the adapter's part added, rounded once to the weight's dtype."""
    weight = _values(rows, target.place)
    first = _first(target, start)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # `_check` sees what overflows
        added, _ = target.lengthened(weight + target.b[first : first + len(weight)] @ target.a, first)
    if target.place.dtype == "BF16":
        rounded = bfloat16_bits(added).astype("<u2")
    else:
        with np.errstate(over="ignore"):
            rounded = added.astype("<f4" if target.place.dtype == "F32" else "<f2")
    data: bytes = rounded.tobytes()
    return data


def _first(target: _Target, start: int) -> int:
    """Return the number of the row that begins at this byte of the tensor."""
    return start * target.place.shape[0] // (target.place.end - target.place.start)


def _values(rows: bytes, place: TensorPlace) -> np.ndarray:
    """Return bytes of whole rows as fp32 [rows, in]."""
    if place.dtype == "BF16":
        flat = (np.frombuffer(rows, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(rows, "<f4" if place.dtype == "F32" else "<f2").astype(np.float32)
    return flat.reshape(-1, place.shape[1])


def _check(base: Path, merged: Path, targets: list[_Target], advance: Callable[[int], None]) -> np.ndarray:
    """Read a merged file again and compare: every byte outside of `targets` is the base's, and a changed
    weight is W + scale * B A (with DoRA at its length), computed in fp64, rounded once to the weight's dtype.

    Returns the sums of squares of what rounding changed and of what the adapter adds. Raises IntegrityError.
    """
    sums = np.zeros(2)
    changed = sorted((t.place.start, t.place.end) for t in targets)
    with base.open("rb") as before, merged.open("rb") as after:
        position = 0
        size = base.stat().st_size
        if merged.stat().st_size != size:
            raise IntegrityError(f"{merged}: it has another size than {base}", hint=_AGAIN)
        for start, end in [*changed, (size, size)]:
            before.seek(position)
            after.seek(position)
            for at in range(position, start, _CHUNK):
                count = min(_CHUNK, start - at)
                if before.read(count) != after.read(count):
                    raise IntegrityError(f"{merged}: a weight without adapter is not the base's", hint=_AGAIN)
            position = end
        for target in targets:
            half = _ROUNDING[target.place.dtype]
            tiniest = _TINIEST[target.place.dtype]
            own = np.zeros(2)
            a = target.a.astype(np.float64)
            for (start, old), (_, new) in zip(_rows(before, target), _rows(after, target), strict=True):
                weight, merged_weight = (
                    _values(rows, target.place).astype(np.float64) for rows in (old, new)
                )
                first = _first(target, start)
                b = target.b[first:][: len(weight)].astype(np.float64)
                whole, times = target.lengthened(weight + b @ a, first)
                error = np.abs(merged_weight - whole)
                allowed = half * np.abs(whole) + tiniest
                allowed += _SLACK * (np.abs(weight) + np.abs(b) @ np.abs(a)) * np.abs(times)
                if not bool((error <= allowed).all()):  # NaN is not
                    finite = bool(np.isfinite(merged_weight).all())
                    why = "it is not W + scale * B A" if finite else f"it does not fit {target.place.dtype}"
                    raise IntegrityError(f"{merged}: {target.name}: {why}", hint=_AGAIN)
                own += (error**2).sum(), ((whole - weight) ** 2).sum()
            sums += own
    advance(size)
    return sums


def free_of(path: Path) -> None:
    """Remove an empty directory, so that a whole one can take its name. Raises Conflict."""
    try:
        if path.is_dir():
            os.rmdir(path)
    except OSError as error:
        raise Conflict(f"{path} exists and is not empty", hint="Choose another directory.") from error
