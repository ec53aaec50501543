"""What an agent program and the model said to each other, as rows of tokens.

A request whose messages begin with a chat that was answered before continues that chat's tokens, as they were
sampled. It continues the row where that chat is its end; else, and where nothing is known, it begins a row.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace as changed

from lorad.driver.sampling.generate import joined
from lorad.driver.sampling.routes import SampleRoutes, routes_of, with_routes
from lorad.envs.format import Format
from lorad.envs.protocol import Message, shown
from lorad.errors import SpecError
from lorad.protocol.batch import Chunk
from lorad.records.episodes import EpisodeTurn, Fork

_Tools = Sequence[Mapping[str, Any]]


class _Chat(Struct):
    """A chat that ends with an answer.

    context: all of its tokens.
    said: how many of its last tokens are the answer.
    row: number of the row whose end it was when it was said.
    """

    messages: list[Message]
    tools: _Tools
    context: list[int]
    said: int
    row: int
    is_open: bool


class _ChainRow(Struct):
    """A row of tokens that grows with each answer.

    parts: tokens, and whether they were sampled.
    last: the chat at its end.
    busy: it is being continued.
    routes: see `LiveEpisode`.
    """

    prompt: list[int]
    text: str
    parts: list[tuple[np.ndarray, bool]]
    logprobs: list[np.ndarray]
    turns: list[EpisodeTurn]
    last: _Chat
    busy: bool = False
    routes: np.ndarray | None = None


class _AnswerPlace(NamedTuple):
    """The place of the answer to a request.

    row: the row that it continues; None where it begins one.
    known: tokens of the context that the row has already.
    """

    context: list[int]
    row: int | None
    known: int
    messages: list[Message]
    tools: _Tools
    text: str


class Rows(NamedTuple):
    """All rows of an episode, one after the other.

    prompt: text and tokens that the first row begins with; None where nothing was said.
    routes: see `Sample`.
    """

    prompt: tuple[str, list[int]] | None
    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    forks: tuple[Fork, ...]
    turns: list[EpisodeTurn]
    routes: SampleRoutes


class Chains:
    """The rows of one episode. Safe between threads."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._rows: list[_ChainRow] = []
        self._chats: list[_Chat] = []
        self._lock = threading.Lock()

    def size(self, messages: Sequence[Message], tools: _Tools) -> int:
        """Count the tokens of a chat as it would begin a row. Raises SpecError for refused messages."""
        return len(self._format.first(messages, tools)[1])

    def place(self, messages: Sequence[Message], tools: _Tools) -> _AnswerPlace:
        """Find the place of the answer to a request; its row is reserved until `say` or `leave`.

        Raises SpecError where the chat template refuses the messages.
        """
        plain = [_plain(message) for message in messages]
        with self._lock:
            begun_with = [
                chat
                for chat in self._chats
                if chat.is_open and chat.tools == tools and plain[: len(chat.messages)] == chat.messages
            ]
        for chat in sorted(begun_with, key=lambda chat: len(chat.messages), reverse=True):
            if len(chat.messages) == len(plain):
                continue
            news = messages[len(chat.messages) :]
            try:
                before = chat.context[: -chat.said], chat.context[-chat.said :]
                following = self._format.following(news, tools, before)
            except SpecError:  # the template does not say what follows: all of it is written anew
                break
            return self._at(chat, chat.context + following, plain, tools, shown(news))
        text, context = self._format.first(messages, tools)
        with self._lock:
            ends = [row.last for row in self._rows if context[: len(row.last.context)] == row.last.context]
        if ends:
            longest = max(ends, key=lambda chat: len(chat.context))
            return self._at(longest, context, plain, tools, text)
        return _AnswerPlace(context, None, 0, plain, tools, text)

    def _at(
        self, chat: _Chat, context: list[int], plain: list[Message], tools: _Tools, text: str
    ) -> _AnswerPlace:
        with self._lock:
            row = self._rows[chat.row]
            if row.last is not chat or row.busy:
                return _AnswerPlace(context, None, 0, plain, tools, text)
            row.busy = True
            return _AnswerPlace(context, chat.row, len(chat.context), plain, tools, text)

    def leave(self, place: _AnswerPlace) -> None:
        """Give a place up: nothing was said."""
        if place.row is not None:
            with self._lock:
                self._rows[place.row].busy = False

    def say(self, place: _AnswerPlace, chunks: Sequence[Chunk], text: str, answer: Message) -> None:
        """Add an answer of the model, also as the message that the program gets."""
        tokens = joined([chunk.tokens for chunk in chunks])
        with self._lock:
            number = len(self._rows) if place.row is None else place.row
            chat = _Chat(
                [*place.messages, _plain(answer)],
                place.tools,
                [*place.context, *tokens.tolist()],
                tokens.size,
                number,
                self._format.ends_turn(int(tokens[-1])) and chunks[-1].finish == "stop",
            )
            self._chats.append(chat)
            if place.row is None:
                self._rows.append(_ChainRow(place.context, place.text, [], [], [], chat))
            row = self._rows[number]
            if place.row is not None:
                observed = place.context[place.known :]
                row.parts.append((np.array(observed, np.int32), False))
                row.turns[-1] = changed(row.turns[-1], observation=place.text, observed=len(observed))
            row.parts.append((tokens, True))
            row.routes = with_routes(row.routes, chunks, len(place.context), tokens.size)
            row.logprobs.append(joined([chunk.logprobs for chunk in chunks]))
            row.turns.append(EpisodeTurn(text, str(chunks[-1].finish), tokens.size, row=number))
            row.last = chat
            row.busy = False

    def rows(self) -> Rows:
        """Return what was said until now."""
        with self._lock:
            rows = [*self._rows]
        parts = [part for row in rows for part in row.parts]
        forks = list[Fork]()
        turns = list[EpisodeTurn]()
        at = 0
        for row in rows:
            if turns:
                forks.append(Fork(at, row.prompt))
                turns[-1] = changed(turns[-1], observation=row.text)
            turns += row.turns
            at += _size(row)
        masks = [np.full(tokens.size, mine) for tokens, mine in parts]
        return Rows(
            (rows[0].text, rows[0].prompt) if rows else None,
            np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in parts)]),
            np.concatenate([np.zeros(0, np.bool_), *masks]),
            np.concatenate([np.zeros(0, np.float32), *(part for row in rows for part in row.logprobs)]),
            tuple(forks),
            turns,
            routes_of([row.routes for row in rows], [(len(row.prompt), _size(row)) for row in rows]),
        )


def _size(row: _ChainRow) -> int:
    """Count the tokens behind a row's prompt."""
    return sum(tokens.size for tokens, _ in row.parts)


def _plain(message: Message) -> Message:
    """Return a message for comparison: clients write the same in several ways."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    plain: dict[str, Any] = {"role": message.get("role"), "content": content}
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message["tool_call_id"]
    if message.get("name"):
        plain["name"] = message["name"]
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = []
    for call in calls or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments, enc_hook=str).decode()
        plain["tool_calls"].append([call.get("id"), function.get("name"), arguments])
    return plain
