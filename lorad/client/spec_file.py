"""Read the file of a spec as a user names it."""

import sys
from pathlib import Path

from lorad.errors import SpecError
from lorad.files import expanded

_SIZE_LIMIT = 1 << 20  # bytes; an endless file is read no further


def read_spec(spec: str) -> tuple[str, str, Path]:
    """Return the text, its name in messages, and the directory where its relative paths begin.

    spec: a file's name, or `-` for stdin.

    Raises SpecError for what cannot be read.
    """
    path = expanded(spec)
    source = "<stdin>" if spec == "-" else spec
    try:
        with sys.stdin.buffer if spec == "-" else path.open("rb") as file:
            data = file.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
            raise SpecError(
                f"{source}: larger than 1 MiB", hint="A spec is a page of YAML; data goes into its own files."
            )
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{source}: {reason}", hint="`lorad init` writes a spec to start from.") from None
    return text, source, Path.cwd() if spec == "-" else path.absolute().parent
