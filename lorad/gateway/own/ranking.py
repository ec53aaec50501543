"""Log-probabilities that a pool computes beside sampling: of prompts, and of tokens that were not chosen."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from lorad.errors import NotFound, PoolLost
from lorad.gateway.errors import refused
from lorad.gateway.own.bases import Base, Peer
from lorad.gateway.own.text import Detokenizer
from lorad.gateway.params import UNSUPPORTED, ChatWish, CompletionWish, Wish
from lorad.protocol.batch import Prompt, Ranked
from lorad.protocol.calls import Rank


class Token(NamedTuple):
    """A token of an answer.

    logprob: None for the first of a prompt, and for those of prompts where none were asked for.
    offset: of its text in that of the completion, in characters.
    top: the most likely tokens in its place, with their log-probabilities.
    """

    id: int
    text: str
    logprob: float | None
    offset: int
    top: tuple[tuple[str, float], ...] = ()


class Piece(Struct, frozen=True):
    """More text of completion `index`. finish: `stop` or `length`, set on its last piece."""

    index: int
    text: str
    tokens: list[Token]
    finish: str | None


class Ranking:
    """Adds to pieces what their request wants beside sampled tokens. Belongs to one request."""

    def __init__(self, wish: Wish, peer: Peer, version: str, base: Base, prompts: Sequence[Prompt]) -> None:
        """Raises ApiError for what the engine cannot do."""
        self._wish, self._peer, self._version, self._base = wish, peer, version, base
        self._prompts = prompts
        self._made: dict[int, list[int]] = {}
        self.ranks = wish.alternatives > 0 or (wish.echoes and wish.wants_logprobs)
        if self.ranks and not peer.info.ranks:
            param = "echo" if wish.echoes else "top_logprobs" if isinstance(wish, ChatWish) else "logprobs"
            raise refused(param, f"the engine {peer.info.engine} has no such log-probabilities.", UNSUPPORTED)

    async def added(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with everything that is wanted. Raises what the pool raises."""
        for piece in pieces:
            self._made.setdefault(piece.index, []).extend(token.id for token in piece.tokens)
        if self._wish.echoes:
            pieces = [self._echoed(piece) for piece in pieces]
        if not self.ranks:
            return list(pieces)
        texts = [  # all tokens up to the end of each piece
            np.concatenate([self._prompt(piece.index), np.array(self._made[piece.index], np.int32)])
            for piece in pieces
        ]
        starts = [max(text.size - len(piece.tokens), 1) for piece, text in zip(pieces, texts, strict=True)]
        request = Rank(self._version, texts, starts, self._wish.alternatives)
        ranked: Ranked = await self._peer.connection.call("rank", request)
        counts = [text.size - start for text, start in zip(texts, starts, strict=True)]
        ends = np.cumsum([0, *counts]).tolist()
        return [
            self._filled(piece, ranked.part(start, stop))
            for piece, start, stop in zip(pieces, ends, ends[1:], strict=False)
        ]

    def echoed(self, piece: Piece) -> int:
        """Return how many of its tokens are of the prompt."""
        return self._prompt(piece.index).size if self._wish.echoes else 0

    def _prompt(self, index: int) -> np.ndarray:
        return self._prompts[index // self._wish.n].tokens

    def _filled(self, piece: Piece, ranked: Ranked) -> Piece:
        """Replace the log-probabilities of the last tokens of a piece."""
        known = len(piece.tokens) - ranked.logprobs.size
        text, tokens = self._base.token_text, piece.tokens[:known]
        rows = zip(
            piece.tokens[known:],
            ranked.logprobs.tolist(),
            ranked.top_tokens.tolist(),
            ranked.top_logprobs.tolist(),
            strict=True,
        )
        for token, logprob, others, values in rows:
            top = tuple((text(other), value) for other, value in zip(others, values, strict=True))
            tokens.append(token._replace(logprob=logprob, top=top))
        return Piece(piece.index, piece.text, tokens, piece.finish)

    def _echoed(self, piece: Piece) -> Piece:
        """Put the prompt before a whole completion."""
        detokenizer, tokens, text = Detokenizer(self._base.tokenizer.decode), list[Token](), ""
        for number in self._prompt(piece.index).tolist():
            tokens.append(Token(number, self._base.token_text(number), None, len(text)))
            text += detokenizer.add([number])
        text += detokenizer.rest()
        given = self._wish.prompt if isinstance(self._wish, CompletionWish) else None
        if isinstance(given, list) and isinstance(given[0], str):
            given = given[piece.index // self._wish.n]
        text = given if isinstance(given, str) else text
        tokens += [token._replace(offset=token.offset + len(text)) for token in piece.tokens]
        return Piece(piece.index, text + piece.text, tokens, piece.finish)


async def after_sampling(ranking: Ranking, pieces: Sequence[Piece]) -> list[Piece]:
    """`added` when the tokens are there already: a version that was let go meanwhile is asked for again."""
    try:
        return await ranking.added(pieces)
    except NotFound as error:
        raise PoolLost(f"the version was let go: {error.message}", hint="Ask again.") from error
