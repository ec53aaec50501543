"""Writes generations as OpenAI does: text_completion, chat.completion, and the chunks of both."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lorad.gateway.own.generation import Generation
from lorad.gateway.own.ranking import Piece, Token
from lorad.gateway.own.text import BROKEN
from lorad.gateway.params import ChatWish, Wish
from lorad.rl.tools.parsing import Splitter

_Json = dict[str, Any]  # parts of OpenAI's answers, which only a client reads


class AnswerForm(ABC):
    """Writes one answer.

    Its `model` is the requested name, its `system_fingerprint` the version that answers.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, wish: Wish, generation: Generation) -> None:
        self._generation = generation
        self._wish = wish
        self._begun: set[int] = set()
        self._about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": wish.model,
            "system_fingerprint": f"lorad-{generation.served.name}",
        }

    def whole(self, pieces: Sequence[Piece]) -> _Json:
        choices = [self.whole_choice(piece) for piece in pieces]
        return {
            **self._about,
            "object": self.whole_object,
            "choices": choices,
            "usage": self._generation.usage,
        }

    def chunks(self, piece: Piece) -> list[_Json]:
        """Return the chunks of a piece in a stream: none, one, or two if the end needs its own."""
        choices = self.stream_choices(piece)
        self._begun.add(piece.index)
        usage = {"usage": None} if self._wish.wants_usage else {}
        return [
            {**self._about, "object": self.chunk_object, "choices": [choice], **usage} for choice in choices
        ]

    def last(self) -> list[_Json]:
        """Return the chunks that follow all pieces."""
        if not self._wish.wants_usage:
            return []
        return [{**self._about, "object": self.chunk_object, "choices": [], "usage": self._generation.usage}]

    def _ids(self, piece: Piece) -> _Json:
        """Return the sampled tokens of a piece, without an echoed prompt, if they were asked for."""
        if not self._wish.return_token_ids:
            return {}
        echoed = len(self._generation.prompt_of(piece.index)) if self._wish.echoes else 0
        return {"token_ids": [token.id for token in piece.tokens[echoed:]]}

    @abstractmethod
    def whole_choice(self, piece: Piece) -> _Json:
        """Return a choice of a whole answer."""

    def stream_choices(self, piece: Piece) -> list[_Json]:
        """Return the choices of a piece in a stream; none if there is nothing to send."""
        says_something = piece.text or piece.finish is not None
        asks_for_tokens = self._wish.wants_logprobs or self._wish.return_token_ids
        return [self.whole_choice(piece)] if says_something or asks_for_tokens else []


class CompletionShape(AnswerForm):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole_choice(self, piece: Piece) -> _Json:
        logprobs = None
        if self._wish.wants_logprobs:
            tops: list[dict[str, float] | None] | None = None
            if self._wish.alternatives:  # the token itself is among them; the first of a prompt has none
                tops = [
                    None if token.logprob is None else {**dict(token.top), token.text: token.logprob}
                    for token in piece.tokens
                ]
            logprobs = {
                "tokens": [token.text for token in piece.tokens],
                "token_logprobs": [token.logprob for token in piece.tokens],
                "top_logprobs": tops,
                "text_offset": [token.offset for token in piece.tokens],
            }
        about = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }
        if self._wish.return_token_ids and piece.index not in self._begun:
            about["prompt_token_ids"] = self._generation.prompt_of(piece.index)
        return about | self._ids(piece)


class ChatShape(AnswerForm):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, wish: ChatWish, generation: Generation) -> None:
        super().__init__(wish, generation)
        form = generation.base.tokenizer.call_form if wish.offered() else None
        self._splitters = [Splitter(form, wish.offered()) for _ in range(wish.n)] if form else None
        self._most_calls = None if wish.parallel_tool_calls else 1

    def whole(self, pieces: Sequence[Piece]) -> _Json:
        prompt = {"prompt_token_ids": self._generation.prompt_of(0)} if self._wish.return_token_ids else {}
        return super().whole(pieces) | prompt

    def chunks(self, piece: Piece) -> list[_Json]:
        is_first = not self._begun
        chunks = super().chunks(piece)
        if chunks and is_first and self._wish.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._generation.prompt_of(0)
        return chunks

    def whole_choice(self, piece: Piece) -> _Json:
        text, calls, finish = self._split(piece)
        message: _Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text if text.strip() else None, "tool_calls": calls}
        logprobs = self._logprobs_of(piece.tokens) if self._wish.wants_logprobs else None
        about = {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        return about | self._ids(piece)

    def stream_choices(self, piece: Piece) -> list[_Json]:
        """Return the role first, the reason for the end last."""
        text, calls, finish = self._split(piece)
        logprobs = None
        if self._wish.wants_logprobs and piece.tokens:
            logprobs = self._logprobs_of(piece.tokens)
        deltas: list[tuple[_Json, _Json | None, str | None]] = []
        if piece.index not in self._begun:
            deltas.append(({"role": "assistant", "content": ""}, None, None))
        if text or logprobs or (self._wish.return_token_ids and piece.tokens):
            deltas.append(({"content": text}, logprobs, None))
        if calls:
            numbered = [{"index": place, **call} for place, call in enumerate(calls)]
            deltas.append(({"tool_calls": numbered}, None, None))
        if finish is not None:
            deltas.append(({}, None, finish))
        ids = self._ids(piece)
        return [
            {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            | (ids if "content" in delta and "role" not in delta else {})
            for delta, logprobs, finish in deltas
        ]

    def _split(self, piece: Piece) -> tuple[str, list[_Json], str | None]:
        """Return (text to send, calls, reason for the end) of a piece.

        A call that cannot be read stays text, as in vLLM.
        """
        if self._splitters is None:
            return piece.text, [], piece.finish
        splitter = self._splitters[piece.index]
        text = splitter.add(piece.text)
        if piece.finish is None:
            return text, [], None
        split = splitter.rest()
        text += split.text + "".join(call.written for call in split.calls if call.arguments is None)
        calls = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in split.calls
            if call.arguments is not None
        ][: self._most_calls]
        return text, calls, "tool_calls" if calls and piece.finish == "stop" else piece.finish

    def _logprobs_of(self, tokens: Sequence[Token]) -> _Json:
        content = [
            {
                **_described(token.text, token.logprob),
                "top_logprobs": [_described(text, logprob) for text, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _described(text: str, logprob: float | None) -> _Json:
    # the text of a part of a character does not show its bytes
    return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}
