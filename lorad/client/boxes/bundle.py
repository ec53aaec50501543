"""Send the files that a spec names to another box along with it, as `--send` asks."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import msgspec

from lorad.bounds import BUNDLE_BYTES, BUNDLE_FILES, BUNDLE_PART, MIB
from lorad.client.answers import answer_of, written
from lorad.client.transport import Transport
from lorad.errors import IntegrityError, SpecError, StorageError
from lorad.records.checks import Bundle
from lorad.records.requests import BundleRequest
from lorad.records.routes import Api

_MADE_AGAIN = "__pycache__"
_COPY = "Copy it to the box, and name its directory there by --cwd."


def files_here(body: Any) -> dict[str, Path]:
    """Find the relative paths that a request with a spec names and that exist here, by its words."""
    from lorad.spec.text import mapping  # slow, and needed for specs alone

    in_spec = ((Path(body.cwd), text) for text in _texts(mapping(body.spec, source=body.source)))
    typed = ((Path.cwd(), str(text).partition("=")[2].strip("\"' ")) for text in body.overrides)
    files = {}
    for directory, text in (*in_spec, *typed):
        name: str = text.partition(":")[0]  # the function behind it is not of the path
        is_path = ("/" in name or "." in name) and name[:1] not in ("/", "~") and len(name) < 1024
        if is_path and (directory / name).exists():
            files[name] = directory / name
    return files


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of what YAML makes, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in (*value, *(value.values() if isinstance(value, dict) else ())):
            yield from _texts(part)


def send(http: Transport, body: Any) -> str:
    """Send the files that a spec names, and return their directory on the box. What it has is not sent again.

    Raises SpecError for what cannot be sent, StorageError for a file that cannot be read, and what the daemon
    there refuses.
    """
    files: dict[str, Path] = {}  # also those in directories
    for name, path in files_here(body).items():
        if ".." in PurePath(name).parts:
            raise SpecError(f"{name} is not below the directory of the spec", hint=_COPY)
        for file_path in (path, *(path.rglob("*") if path.is_dir() else ())):
            below = file_path.relative_to(path)
            if file_path.is_file() and _MADE_AGAIN not in below.parts:
                files[os.path.normpath(name / below)] = file_path
            if len(files) > BUNDLE_FILES:
                raise SpecError(f"{name} and what is below it are more than {BUNDLE_FILES} files", hint=_COPY)
    contents = {}
    room = BUNDLE_BYTES - MIB  # for the names
    for name, path in sorted(files.items()):
        try:
            with path.open("rb") as file:
                contents[name] = file.read(room + 1)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        room -= len(contents[name])
        if room < 0:
            most = BUNDLE_BYTES // MIB
            raise SpecError(f"{name} and what else is sent are more than {most} MiB", hint=_COPY)
    head = msgspec.json.encode([(name, len(content)) for name, content in contents.items()])
    data = b"".join((head, b"\n", *contents.values()))
    sha256 = hashlib.sha256(data).hexdigest()
    received = 0
    part = b""  # the first question is what has come
    while True:
        request = BundleRequest(len(data), received, part)
        method, url, _ = written(Api.send_files, None, {"bundle": sha256})
        bundle = answer_of(Bundle, http.ask(method, url, request))
        if bundle.directory:
            return bundle.directory
        if part and bundle.received <= received:
            message = f"the box has {bundle.received} bytes of {len(data)}, and takes no more"
            raise IntegrityError(message, hint="Call it again.")
        received = bundle.received
        part = data[received : received + BUNDLE_PART]
