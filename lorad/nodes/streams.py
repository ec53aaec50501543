"""Lines, files and tunnels on the connections between a pool and its agents."""

import asyncio
import contextlib
import hashlib
import re
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from lorad.errors import IntegrityError, LoradError, StorageError, from_wire
from lorad.nodes.messages import AnyMessage, Failed, FileEntry
from lorad.protocol.listener import listen, remove

_CHUNK = 1 << 20
_MOST_FILES = 1024
_SILENT_SECONDS = 60.0  # amid the bytes of a file
_NAME = re.compile(r"[^/.\x00-\x1f\x7f][^/\x00-\x1f\x7f]{0,200}")
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")


class Broken(ConnectionError):
    """The other end broke the protocol, or ended amid a message."""


def inside(root: Path, name: str) -> Path:
    """Return the path of `name` in `root`. Raises Broken for what is not a plain relative path."""
    if not all(_NAME.fullmatch(part) for part in name.split("/")):
        raise Broken(f"{name!r} is no path in a node's directory")
    return root / name


async def read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Return the next line, decoded. Raises Broken."""
    try:
        return msgspec.json.decode(await reader.readuntil(), type=kind)
    except EOFError as error:
        raise Broken("the connection was closed") from error
    except (asyncio.LimitOverrunError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(str(error)) from error


async def write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")
    await writer.drain()


async def answer_of(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Return the other end's answer of this kind. Raises what it refused with, or Broken."""
    message: AnyMessage = await read(reader, AnyMessage)  # type: ignore[arg-type]
    if isinstance(message, Failed):
        raise from_wire(message.error)
    if not isinstance(message, kind):
        raise Broken(f"{type(message).__name__} instead of {kind.__name__}")
    return message


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Describe the files of a directory, which has no others inside. Blocks."""
    files = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files.append(FileEntry(path.name, path.stat().st_size, digest))
    return tuple(files)


async def send_files(writer: asyncio.StreamWriter, directory: Path, files: Sequence[FileEntry]) -> None:
    """Send the bytes of files. Raises OSError for one that is gone, Broken for one that is shorter by now."""
    for data in read_files(directory, files):
        writer.write(data)
        await writer.drain()


def read_files(directory: Path, files: Sequence[FileEntry]) -> Iterator[bytes]:
    """Yield the bytes of files. Raises as `send_files`. Blocks for moments."""
    for said in files:
        left = said.size
        with (directory / said.name).open("rb") as file:
            while left:
                if not (data := file.read(min(left, _CHUNK))):
                    raise Broken(f"{said.name} was cut")
                yield data
                left -= len(data)


async def receive_files(
    reader: asyncio.StreamReader,
    final: Path,
    files: Sequence[FileEntry],
    pass_on: Callable[[bytes], Awaitable[None]] | None = None,
) -> None:
    """Make the directory `final` of what arrives, whole or not at all; `pass_on` is called with all bytes.

    Raises IntegrityError for other bytes than announced, StorageError when they cannot be written, and
    Broken.
    """
    if len(files) > _MOST_FILES or any(file.size < 0 for file in files):
        raise Broken(f"{len(files)} files in a directory")
    temporary = final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}")  # it may be coming twice
    try:
        if (size := sum(file.size for file in files)) > (free := shutil.disk_usage(final.parent).free):
            raise StorageError(
                f"{final} would have {size} bytes, and {free} are free", hint="Free some space there."
            )
        temporary.mkdir(mode=0o700)
        for said in files:
            await _receive(reader, inside(temporary, said.name), said, pass_on)
        temporary.rename(final)
    except Broken:
        raise
    except OSError as error:
        raise StorageError(
            f"{final} could not be written: {error.strerror or error}", hint="Free some space there."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


async def _receive(
    reader: asyncio.StreamReader,
    path: Path,
    entry: FileEntry,
    pass_on: Callable[[bytes], Awaitable[None]] | None,
) -> None:
    digest = hashlib.sha256()
    left = entry.size
    with path.open("xb") as file:
        while left:
            try:
                async with asyncio.timeout(_SILENT_SECONDS):
                    data = await reader.read(min(left, _CHUNK))
            except TimeoutError:
                raise Broken(f"{path.name} stopped amid its bytes") from None
            if not data:
                raise Broken(f"{path.name} was cut off")
            digest.update(data)
            file.write(data)
            if pass_on is not None:
                await pass_on(data)
            left -= len(data)
    if digest.hexdigest() != entry.sha256:
        raise IntegrityError(
            f"{path.name}: other bytes arrived than were sent", hint="Nothing was changed; try again."
        )


@contextlib.asynccontextmanager
async def listening(
    path: Path,
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    limit: int = 1 << 16,
) -> AsyncIterator[None]:
    """Have a Unix socket, 0600, whose callers go to `accept`; a line has at most `limit` bytes."""
    server = await asyncio.start_unix_server(accept, sock=listen(path), limit=limit)
    try:
        yield
    finally:
        server.close()
        remove(path)


async def splice(left: Pair, right: Pair) -> None:
    """Join two connections until both directions have ended; a half that is closed is closed over there."""
    try:
        await asyncio.gather(_pump(left[0], right[1]), _pump(right[0], left[1]))
    finally:
        for _, writer in (left, right):
            drop(writer)


def drop(writer: asyncio.StreamWriter) -> None:
    """End a connection at once.

    One with TLS that was closed before raises AttributeError in Python 3.11.2.
    """
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS has no half that is closed
            writer.close()
            await writer.wait_closed()


def never_hangs(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Have the kernel give a TCP connection up whose peer has not acknowledged for so long."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def as_error(error: BaseException) -> LoradError:
    """Return the error as it may travel."""
    return error if isinstance(error, LoradError) else LoradError(f"{type(error).__name__}: {error}")
