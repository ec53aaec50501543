"""The directory of a model: where it is, and whether its weight files are whole."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from lorad.errors import SpecError
from lorad.files import open_file, refuse_sparse
from lorad.models.directory import resolve, weight_files


def model_directory(path: str, cwd: Path, *, any_architecture: bool) -> Path:
    """Return the model's directory, like `resolve`, with relative paths from `cwd`."""
    local = cwd / Path(path).expanduser()
    found = str(local) if local.is_dir() and not path.startswith("builtin:") else path
    return resolve(found, any_architecture=any_architecture)


def check_weights(directory: Path) -> None:
    """Check that every weight file is as long as its header says. Raises SpecError."""
    for path in weight_files(directory):
        try:
            with open_file(path) as file, safe_open(path, framework="np"):
                refuse_sparse(file, path)
        except (SafetensorError, OSError) as error:
            told = getattr(error, "strerror", None) or error
            raise SpecError(
                f"{path} is damaged: {told}", key="model.path", hint="Download or copy it again."
            ) from None
