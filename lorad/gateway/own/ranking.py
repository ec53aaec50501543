"""Adds log-probabilities that a pool computes beside sampling, for prompts and for tokens not chosen."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from lorad.errors import NotFound, PoolLost
from lorad.gateway.errors import refused
from lorad.gateway.own.bases import AnsweringPool, Base
from lorad.gateway.own.text import Detokenizer
from lorad.gateway.params import UNSUPPORTED, ChatWish, CompletionWish, Wish
from lorad.protocol.batch import Prompt, Ranked
from lorad.protocol.calls import Rank


class Token(NamedTuple):
    """A token of an answer.

    Attributes:
        logprob: None for the first token of a prompt, and for all of a prompt where none were asked for.
        offset: Where its text begins in the text of the completion, in characters.
        top: The most likely tokens in its place, with their log-probabilities.
    """

    id: int
    text: str
    logprob: float | None
    offset: int
    top: tuple[tuple[str, float], ...] = ()


class Piece(Struct, frozen=True):
    """More text of a completion.

    Attributes:
        finish: `stop` or `length` on the completion's last piece, else None.
    """

    index: int
    text: str
    tokens: list[Token]
    finish: str | None


class Ranking:
    """Adds to the pieces of one request what it asks for beside sampled tokens."""

    def __init__(
        self, wish: Wish, peer: AnsweringPool, version: str, base: Base, prompts: Sequence[Prompt]
    ) -> None:
        """Check what the request asks for. Raises ApiError for what the engine cannot do."""
        self._wish = wish
        self._peer = peer
        self._version = version
        self._base = base
        self._prompts = prompts
        self._sampled: dict[int, list[int]] = {}  # tokens by completion
        self.ranks = wish.alternatives > 0 or (wish.echoes and wish.wants_logprobs)
        if self.ranks and not peer.info.ranks:
            param = "echo" if wish.echoes else "top_logprobs" if isinstance(wish, ChatWish) else "logprobs"
            raise refused(param, f"the engine {peer.info.engine} has no such log-probabilities.", UNSUPPORTED)

    async def completed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with everything that was asked for. Raises what the pool raises."""
        for piece in pieces:
            self._sampled.setdefault(piece.index, []).extend(token.id for token in piece.tokens)
        if self._wish.echoes:
            pieces = [self._with_prompt(piece) for piece in pieces]
        if not self.ranks:
            return list(pieces)
        texts = [  # all tokens up to the end of each piece
            np.concatenate([self._prompt(piece.index), np.array(self._sampled[piece.index], np.int32)])
            for piece in pieces
        ]
        starts = [max(text.size - len(piece.tokens), 1) for piece, text in zip(pieces, texts, strict=True)]
        request = Rank(self._version, texts, starts, self._wish.alternatives)
        ranked: Ranked = await self._peer.connection.call("rank", request)
        counts = [text.size - start for text, start in zip(texts, starts, strict=True)]
        ends = np.cumsum([0, *counts]).tolist()
        filled = []
        for piece, start, stop in zip(pieces, ends, ends[1:], strict=False):
            part = ranked.part(start, stop)
            first = len(piece.tokens) - part.logprobs.size  # the pool ranked the tokens from this one on
            tokens = piece.tokens[:first]
            rows = zip(
                piece.tokens[first:],
                part.logprobs.tolist(),
                part.top_tokens.tolist(),
                part.top_logprobs.tolist(),
                strict=True,
            )
            for token, logprob, others, values in rows:
                texts_of_others = map(self._base.token_text, others)
                top = tuple(zip(texts_of_others, values, strict=True))
                tokens.append(token._replace(logprob=logprob, top=top))
            filled.append(Piece(piece.index, piece.text, tokens, piece.finish))
        return filled

    def _prompt(self, index: int) -> np.ndarray:
        return self._prompts[index // self._wish.n].tokens

    def _with_prompt(self, piece: Piece) -> Piece:
        """Put the prompt before a whole completion."""
        detokenizer = Detokenizer(self._base.tokenizer.decode)
        tokens = list[Token]()
        text = ""
        for number in self._prompt(piece.index).tolist():
            tokens.append(Token(number, self._base.token_text(number), None, len(text)))
            text += detokenizer.add(number)
        text += detokenizer.rest()
        prompt = self._wish.prompt if isinstance(self._wish, CompletionWish) else None
        if isinstance(prompt, list) and isinstance(prompt[0], str):
            prompt = prompt[piece.index // self._wish.n]
        text = prompt if isinstance(prompt, str) else text
        tokens += [token._replace(offset=token.offset + len(text)) for token in piece.tokens]
        return Piece(piece.index, text + piece.text, tokens, piece.finish)


async def after_sampling(ranking: Ranking, pieces: Sequence[Piece]) -> list[Piece]:
    """Complete pieces whose tokens were sampled; a version that was let go meanwhile is asked for again."""
    try:
        return await ranking.completed(pieces)
    except NotFound as error:
        raise PoolLost(f"the version was let go: {error.message}", hint="Ask again.") from error
