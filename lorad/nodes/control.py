"""The control connection of an agent, on which its pool has children started, followed and ended."""

import asyncio
import codecs
import contextlib
import fnmatch
import shutil
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from lorad.adapters.directory import sha256_of
from lorad.children.process import Child
from lorad.errors import Conflict, NotFound, to_wire
from lorad.files import write_whole
from lorad.models.facts import weights_sha256
from lorad.nodes import messages
from lorad.nodes.messages import AgentMessage, AnyRequest, Done, Ended, Failed, Leaving, Logged, Wrote
from lorad.nodes.streams import Pair, as_error, inside, read, write

_LOOK_SECONDS = 0.2  # between two looks at what a child wrote
_TEXT = 1 << 18  # bytes of a log in one message
_FOLLOWED = 1 << 20  # bytes of a file that is followed
_LOG_BYTES = 64 << 20  # of a log that was sent already, before it is cut


class Control:
    """Does what the pool asks of an agent whose files lie in `directory`.

    It calls `trust` for `messages.Trust`, and `on_leave` for `messages.Leave`.
    """

    def __init__(
        self, directory: Path, trust: Callable[[Iterable[str]], None], on_leave: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._trust = trust
        self._on_leave = on_leave
        self.children: dict[str, Child] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._saying = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._sha256: dict[tuple[object, ...], str] = {}

    async def serve(self, pair: Pair, renew: asyncio.Event) -> None:
        """Answer requests until the connection ends; each sets `renew`."""
        reader, self._writer = pair
        while True:
            request: AnyRequest = await read(reader, AnyRequest)  # type: ignore[arg-type]
            renew.set()
            self._spawn(self._answer(request))

    def leave(self) -> bool:
        """Tell the pool that the agent was asked to end. Returns False when no pool has led it yet."""
        if self._writer is None:
            return False
        self._spawn(self._say(Leaving()))
        return True

    async def stop(self, grace: float) -> None:
        """End all children; returns when nothing of them is left."""
        await asyncio.gather(*(child.stop(grace) for child in self.children.values()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _say(self, message: AgentMessage) -> None:
        assert self._writer is not None
        with contextlib.suppress(OSError):  # the pool is gone: the agent ends
            async with self._saying:
                await write(self._writer, message)

    async def _answer(self, request: AnyRequest) -> None:
        """Do what is asked, and answer with the result or the error."""
        value = ""
        try:
            match request:
                case messages.Spawn():
                    value = await self._start(request)
                case messages.Stop():
                    await self._child(request.name).stop(request.grace)
                case messages.Dump():
                    await self._child(request.name).dump()
                case messages.Write():
                    write_whole(inside(self._directory, request.name), request.text.encode(), durable=False)
                case messages.Make():
                    inside(self._directory, request.name).mkdir(mode=0o700)
                case messages.Remove():
                    await asyncio.to_thread(_remove, inside(self._directory, request.name))
                case messages.Trust():
                    self._trust(request.certificates)
                case messages.Leave():
                    self._on_leave()
                case messages.Digest():
                    value = await asyncio.to_thread(sha256_of, inside(self._directory, request.name))
                case messages.Weights():
                    value = await asyncio.to_thread(self._weights, Path(request.directory))
            await self._say(Done(id=request.id, value=value))
        except Exception as error:
            await self._say(Failed(id=request.id, error=to_wire(as_error(error))))

    def _child(self, name: str) -> Child:
        if (child := self.children.get(name)) is None:
            raise NotFound(f"no child {name} was started")
        return child

    async def _start(self, asked: messages.Spawn) -> str:
        """Start a child; one of the same name must have ended."""
        if (earlier := self.children.get(asked.name)) is not None and earlier.is_alive:
            raise Conflict(f"{asked.name} runs already")
        place = inside(self._directory, asked.name)
        shutil.rmtree(place, ignore_errors=True)
        (place / "tmp").mkdir(mode=0o700, parents=True)
        for name, text in asked.files.items():
            write_whole(inside(place, name), text.encode(), durable=False)
        record = self._directory / f"{asked.name}.record"
        child = Child(asked.argv, asked.env, place / "log", record, place)
        self.children[asked.name] = child
        await child.start()
        self._spawn(self._follow(asked, child, place))
        return str(child.pid)

    async def _follow(self, asked: messages.Spawn, child: Child, place: Path) -> None:
        """Send what the child logs, and files that it changes, until it has ended."""
        ended = asyncio.create_task(child.ended())
        news = _ChildNews(asked.name, place, asked.follow)
        while True:
            done, _ = await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
            for message in news.look():
                await self._say(message)
            if done:
                break
        await self._say(Ended(name=asked.name, how=ended.result()))

    def _weights(self, directory: Path) -> str:
        """Return the digest of a base's weights, cached for files that have not changed. Blocks."""
        files = [(path.name, path.stat()) for path in sorted(directory.glob("*.safetensors"))]
        key = (directory, *((name, s.st_ino, s.st_mtime_ns, s.st_size) for name, s in files))
        if key not in self._sha256:
            self._sha256[key] = weights_sha256(directory)
        return self._sha256[key]


class _ChildNews:
    """Finds what a child wrote since the last look."""

    def __init__(self, name: str, place: Path, patterns: tuple[str, ...]) -> None:
        self._name = name
        self._place = place
        self._patterns = patterns
        self._sent = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a look may cut a character
        self._times: dict[str, int] = {}

    def look(self) -> Iterator[AgentMessage]:
        with contextlib.suppress(OSError):  # the child may remove it
            for path in sorted(self._place.iterdir()):
                if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in self._patterns):
                    continue
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if status.st_size and status.st_mtime_ns != self._times.get(path.name):
                        self._times[path.name] = status.st_mtime_ns
                        with path.open("rb") as file:
                            text = file.read(_FOLLOWED).decode(errors="replace")
                        yield Wrote(name=self._name, file=path.name, text=text)
        log = self._place / "log"
        with contextlib.suppress(OSError), log.open("r+b") as file:
            file.seek(self._sent)
            while data := file.read(_TEXT):
                self._sent += len(data)
                yield Logged(name=self._name, text=self._decoder.decode(data))
            if self._sent > _LOG_BYTES and log.stat().st_size == self._sent:
                file.truncate(0)  # it is appended to
                self._sent = 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
