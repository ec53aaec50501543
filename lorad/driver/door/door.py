"""The door: HTTP on the loopback, with a secret for each episode in its address."""

import asyncio
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from lorad.bounds import Bounds
from lorad.driver.door.chains import Chains
from lorad.driver.door.chat import Chat, DoorRefusal, answer_of, as_template, message_of
from lorad.driver.door.dialects import DIALECTS, MESSAGES, ChatDialect
from lorad.errors import LoradError, SpecError
from lorad.http.serve import LOCAL, Listener, SocketFile, serve
from lorad.protocol.batch import Chunk, Sampling
from lorad.rl.tools.calls import CallForm

_MOST_BYTES = 16 << 20  # of a request
_GOODBYE_SECONDS = 0.05  # for a request under way; aiohttp takes 0 for no limit
# of programs, which may be slow and many
_CONNECTIONS = Bounds(head=60.0, idle=3600.0, write=60.0, of_one=4096, of_own=4096)


@dataclass(eq=False)
class Visit:
    """An episode whose program may speak with the model.

    speak: samples a turn behind a context, as (context, number of the turn, most tokens).
    text_of: decodes a turn's tokens, with the calls in it.
    refused: the last limit that the program ran into, "turns" or "tokens".
    """

    chains: Chains
    version: str
    how: Sampling
    turns: int
    max_tokens: int
    form: CallForm | None
    speak: Callable[[list[int], int, int], list[Chunk]]
    text_of: Callable[[list[int]], str]
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    turns_begun: int = 0
    refused: str = ""
    failed: Exception | None = None
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, chat: Chat) -> dict[str, Any]:
        """Let the model answer. Safe between threads. Raises DoorRefusal, and what the pool raises."""
        if chat.tools and self.form is None:
            raise DoorRefusal("tools: lorad does not know how this model writes calls of tools.", "tools")
        with self._counting:
            turn = self.turns_begun  # from 0
            if turn == self.turns:
                self.refused = "turns"
                problem = f"The episode has had its {self.turns} turns (env.turns)."
                raise DoorRefusal(problem, code="turns_exceeded")
            self.turns_begun += 1
        try:
            place = self.chains.place(as_template(chat.messages), chat.tools)
        except SpecError as error:
            raise DoorRefusal(str(error), "messages") from None
        try:
            size = len(place.context)
            if size + self.how.max_new_tokens > self.max_tokens:
                self.refused = "tokens"
                # clients know an episode that has become too long by these words of OpenAI's and vLLM's
                words = f"This model's maximum context length is {self.max_tokens} tokens (env.max_tokens)"
                words += f": {size} tokens of messages leave no room for a turn of "
                words += f"{self.how.max_new_tokens} (rollout.max_new_tokens)."
                raise DoorRefusal(words, "messages", "context_length_exceeded")
            chunks = self.speak(place.context, turn, chat.most)
            tokens = [token for chunk in chunks for token in chunk.tokens.tolist()]
            text = self.text_of(tokens)
            message = message_of(text, self.form, chat.tools)
        except BaseException:
            self.chains.leave(place)
            raise
        self.chains.say(place, chunks, text, message)
        return answer_of(self.version, message, str(chunks[-1].finish), size, len(tokens))

    def size(self, chat: Chat) -> int:
        """Count the tokens of a context. Raises DoorRefusal."""
        try:
            return self.chains.size(as_template(chat.messages), chat.tools)
        except SpecError as error:
            raise DoorRefusal(str(error), "messages") from None


_Answer = Callable[[Visit, web.Request], Awaitable[web.Response]]


class Door:
    """HTTP for the programs of the episodes that are let in, in a thread of its own until `close`."""

    def __init__(self, threads: ThreadPoolExecutor, path: Path | None = None) -> None:
        """Start the thread that answers. The model speaks in `threads`.

        path: a Unix socket beside the port, for programs without a network.
        """
        self._threads = threads
        self._path = path
        self._visits: dict[str, Visit] = {}
        self._bound_port: Future[int] = Future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name="door")
        self._thread.start()
        self._port = self._bound_port.result()

    def let_in(self, visit: Visit) -> str:
        """Let the program of an episode in, and return its base URL."""
        self._visits[visit.secret] = visit
        return f"http://127.0.0.1:{self._port}/episodes/{visit.secret}/v1"

    def send_away(self, visit: Visit) -> None:
        """Refuse what comes from now on: the episode is over."""
        self._visits.pop(visit.secret, None)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _live(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._bound_port.done():
                raise
            self._bound_port.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=_MOST_BYTES)
        answers: dict[str, _Answer] = {"messages/count_tokens": self._count}
        answers |= {path: partial(self._answer, dialect) for path, dialect in DIALECTS.items()}
        for path, answer in answers.items():
            app.router.add_post(f"/episodes/{{secret}}/v1/{path}", partial(self._of_visit, answer))
        app.router.add_get("/episodes/{secret}/v1/models", partial(self._of_visit, self._models))
        listener = socket.create_server((LOCAL, 0))
        listeners: list[Listener] = [listener]
        if self._path is not None:
            listeners.append(SocketFile(self._path))
        async with serve(app, listeners, _CONNECTIONS, name="the door", goodbye=_GOODBYE_SECONDS):
            self._bound_port.set_result(int(listener.getsockname()[1]))
            await self._ended.wait()
        await asyncio.sleep(0)  # for transports to close their sockets

    async def _of_visit(self, answer: _Answer, request: web.Request) -> web.Response:
        """Have a request answered if its episode is under way."""
        visit = self._visits.get(request.match_info["secret"])
        if visit is None:
            refusal = DoorRefusal("There is no such episode, or it is over.", code="episode_over")
            return web.json_response(refusal.body, status=404)
        return await answer(visit, request)

    async def _models(self, visit: Visit, _: web.Request) -> web.Response:
        model = {"id": visit.version, "object": "model", "created": 0, "owned_by": "lorad"}
        model["max_model_len"] = visit.max_tokens
        return web.json_response({"object": "list", "data": [model]})

    async def _count(self, visit: Visit, request: web.Request) -> web.Response:
        """Count the tokens of a request of Anthropic's, which clients ask for to compact in time."""
        try:
            chat = MESSAGES.read(await request.read(), visit.how)
            size = await self._loop.run_in_executor(self._threads, visit.size, chat)
        except DoorRefusal as refusal:
            return web.json_response(MESSAGES.refuse(refusal), status=400)
        return web.json_response({"input_tokens": size})

    async def _answer(self, dialect: ChatDialect, visit: Visit, request: web.Request) -> web.Response:
        try:
            chat = dialect.read(await request.read(), visit.how)
            answer = await self._loop.run_in_executor(self._threads, visit.answer, chat)
        except DoorRefusal as refusal:
            return web.json_response(dialect.refuse(refusal), status=400)
        except LoradError as error:  # of the pool: the episode cannot go on
            visit.failed = error
            body = {"message": str(error), "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": body}, status=503)
        if chat.is_stream:
            return web.Response(body=dialect.stream(answer, chat), content_type="text/event-stream")
        return web.json_response(dialect.answer(answer))
