"""Generations as OpenAI writes them: text_completion, chat.completion, and the chunks of both."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lorad.gateway.own.generation import Generation, Piece, Token
from lorad.gateway.own.text import BROKEN
from lorad.gateway.params import Wish

_Json = dict[str, Any]  # parts of OpenAI's answers, which only a client reads


class Shape(ABC):
    """The form of one answer.

    `model` is the requested name, `system_fingerprint` the version that answers.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, wish: Wish, generation: Generation, *, logprobs: bool, alternatives: bool = False
    ) -> None:
        self._generation, self._logprobs, self._alternatives = generation, logprobs, alternatives
        self._wants_usage = wish.wants_usage
        self._begun: set[int] = set()
        self._about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": wish.model,
            "system_fingerprint": f"lorad-{generation.served.name}",
        }

    def whole(self, pieces: Sequence[Piece]) -> _Json:
        choices = [self._choice(piece) for piece in pieces]
        return {
            **self._about,
            "object": self.whole_object,
            "choices": choices,
            "usage": self._generation.usage,
        }

    def chunks(self, piece: Piece) -> list[_Json]:
        """Return the chunks of a piece in a stream: two if the end needs its own, none if there is nothing to
        send.
        """
        choices = self._choices(piece)
        self._begun.add(piece.index)
        usage = {"usage": None} if self._wants_usage else {}
        return [
            {**self._about, "object": self.chunk_object, "choices": [choice], **usage} for choice in choices
        ]

    def last(self) -> list[_Json]:
        """Return the chunks that follow all pieces."""
        if not self._wants_usage:
            return []
        return [{**self._about, "object": self.chunk_object, "choices": [], "usage": self._generation.usage}]

    @abstractmethod
    def _choice(self, piece: Piece) -> _Json:
        """Return a choice of a whole answer."""

    @abstractmethod
    def _choices(self, piece: Piece) -> list[_Json]:
        """Return the choices of a piece in a stream."""


class CompletionShape(Shape):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _choice(self, piece: Piece) -> _Json:
        logprobs = self._logprobs_of(piece.tokens) if self._logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _choices(self, piece: Piece) -> list[_Json]:
        is_nothing = not piece.text and piece.finish is None and not self._logprobs
        return [] if is_nothing else [self._choice(piece)]

    def _logprobs_of(self, tokens: Sequence[Token]) -> _Json:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token.text: token.logprob} for token in tokens] if self._alternatives else None,
            "text_offset": [token.offset for token in tokens],
        }


class ChatShape(Shape):
    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _choice(self, piece: Piece) -> _Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs_of(piece.tokens) if self._logprobs else None
        return {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish}

    def _choices(self, piece: Piece) -> list[_Json]:
        """The role comes first, the reason for the end last."""
        logprobs = self._logprobs_of(piece.tokens) if self._logprobs and piece.tokens else None
        deltas: list[tuple[_Json, _Json | None, str | None]] = []
        if piece.index not in self._begun:
            deltas.append(({"role": "assistant", "content": ""}, None, None))
        if piece.text or logprobs:
            deltas.append(({"content": piece.text}, logprobs, None))
        if piece.finish is not None:
            deltas.append(({}, None, piece.finish))
        return [
            {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            for delta, logprobs, finish in deltas
        ]

    def _logprobs_of(self, tokens: Sequence[Token]) -> _Json:
        content = [
            {"token": t.text, "logprob": t.logprob, "bytes": _bytes_of(t.text), "top_logprobs": []}
            for t in tokens
        ]
        return {"content": content, "refusal": None}


def _bytes_of(text: str) -> list[int] | None:
    """Return the bytes of a token, or None if it is only a part of a character, whose text does not show its
    bytes.
    """
    return None if BROKEN in text else list(text.encode())
