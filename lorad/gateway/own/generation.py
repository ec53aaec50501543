"""Runs one request in the pool: opens it for the version that its name means, then yields pieces of its
completions.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorad.errors import EngineGone, NotFound, PoolLost
from lorad.gateway.errors import refused
from lorad.gateway.limits import POOL_SECONDS
from lorad.gateway.own.bases import Base, Bases, Peers
from lorad.gateway.own.prompts import new_tokens, prompts
from lorad.gateway.own.ranking import Piece, Ranking, Token, after_sampling
from lorad.gateway.own.resolve import Resolver
from lorad.gateway.own.text import Detokenizer, StopCutter
from lorad.gateway.params import UNSUPPORTED, ChatWish, Wish
from lorad.gateway.traffic import Counted
from lorad.protocol.batch import Chunk, Chunks, Prompt
from lorad.protocol.calls import Generate
from lorad.protocol.served import Served
from lorad.servers.table import SERVERS

_INLINE = 1 << 14  # bytes of a request whose tokens are made without another thread

_Tokenize = Callable[[Base], list[list[int]]]


@dataclass
class _Completion:
    """One of the completions that a request asked for."""

    index: int
    base: Base
    detokenizer: Detokenizer
    cutter: StopCutter
    made: int = 0  # tokens
    length: int = 0  # characters

    def take(self, chunk: Chunk) -> Piece:
        """Raises PoolLost when the pool ended it early."""
        if chunk.finish == "abort":
            raise PoolLost("the pool ended the request early", hint="Ask again.")
        tokens = chunk.tokens.tolist()
        self.made += len(tokens)
        ends = chunk.finish == "stop" and tokens and tokens[-1] in self.base.eos_ids
        spoken = tokens[:-1] if ends else tokens
        text, described = "", []
        for place, token in enumerate(tokens):
            described.append(
                Token(
                    token, self.base.token_text(token), float(chunk.logprobs[place]), self.length + len(text)
                )
            )
            if place < len(spoken):
                text += self.cutter.add(self.detokenizer.add([token]))
        if chunk.finish is not None:
            text += self.cutter.add(self.detokenizer.rest())
            text += self.cutter.rest()
        self.length += len(text)
        return Piece(
            self.index, text, described, "stop" if chunk.finish and self.cutter.is_cut else chunk.finish
        )


@dataclass
class Generation:
    """A request under way.

    items: of the pool, the first of which is there already. ready: the answer, where nothing is sampled.
    """

    served: Served
    base: Base
    ranking: Ranking
    prompts: list[Prompt]
    completions: list[_Completion]
    first: Any
    items: AsyncGenerator[Any, None]
    counted: Counted
    per_prompt: int = field(default=1)
    ready: list[Piece] | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Tokens that were read and made, those of stop strings among them."""
        read, made = sum(prompt.tokens.size for prompt in self.prompts), sum(c.made for c in self.completions)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def prompt_of(self, index: int) -> list[int]:
        """Return the tokens of the prompt of a completion."""
        found: list[int] = self.prompts[index // self.per_prompt].tokens.tolist()
        return found

    def made(self, piece: Piece) -> list[int]:
        """Return the tokens of a piece without those of an echoed prompt."""
        return [token.id for token in piece.tokens[self.ranking.echoed(piece) :]]

    async def pieces(self, *, streams: bool) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces that the pool sent together; with everything that is wanted, if they are sent on.

        Closing early ends its request. Raises what the pool raises.
        """
        async with aclosing(self.items):
            item = self.first
            while isinstance(item, Chunks):
                if item.version != self.served.name:
                    raise PoolLost(f"the pool answered with {item.version}, not {self.served.name}")
                pieces = [
                    self.completions[int(chunk.prompt) * self.per_prompt + chunk.index].take(chunk)
                    for chunk in item.split(self.prompts)
                ]
                self.counted.said(sum(len(piece.tokens) for piece in pieces))
                if streams and self.ranking.ranks:
                    pieces = await after_sampling(self.ranking, pieces)
                yield pieces
                item = await _following(self.items)


class Asked(NamedTuple):
    """Facts about a request that its wish does not have.

    size: in bytes.
    meant: the version that its name was found to mean, if known.
    """

    tokenize: _Tokenize
    logprobs: bool
    size: int
    meant: str | None = None


@dataclass
class Generator:
    """Opens generations."""

    resolver: Resolver
    bases: Bases
    peers: Peers

    async def open(self, wish: Wish, asked: Asked, counted: Counted) -> Generation:
        """Start a generation and return once the pool has sent its first item.

        If the version is gone, the name is looked up once more, as nothing has been sent. Raises ApiError,
        LoradError.
        """
        served, meant = await self.resolver.find(asked.meant or wish.model), asked.meant
        try:
            return await self._begin(served, wish, asked, counted)
        except (NotFound, PoolLost, EngineGone):
            is_known = meant is None or wish.model in self.resolver.names().aliases
            served = await self.resolver.find_another(wish.model if is_known else str(meant), served)
        return await self._begin(served, wish, asked, counted)

    async def _begin(self, served: Served, wish: Wish, asked: Asked, counted: Counted) -> Generation:
        counted.serves(wish.model, served.name)
        if served.socket is None:
            raise PoolLost(f"no pool serves {served.name} now", hint="Ask again.")
        base, peer = await self.bases.get(served.model_path), await self.peers.get(served.socket)
        tokens = await _tokenized(wish, asked, base)
        engine = peer.info.engine
        if wish.schema and not peer.info.formats:
            hint = SERVERS[engine].schema_hint if engine in SERVERS else ""
            why = f"the engine {engine} of this version follows no JSON schema. {hint}".rstrip()
            raise refused("response_format", why, UNSUPPORTED)
        most = new_tokens(wish, tokens, base, peer.info.max_tokens)
        made = prompts(wish, tokens)
        ranking = Ranking(wish, peer, served.name, base, made)
        decode = base.tokenizer.with_calls if wish.offered() else base.tokenizer.decode
        completions = [
            _Completion(index, base, Detokenizer(decode), StopCutter(wish.stops))
            for index in range(len(made) * wish.n)
        ]
        if not most:
            ready = await ranking.added([Piece(one.index, "", [], "length") for one in completions])
            return Generation(
                served, base, ranking, made, completions, None, _nothing(), counted, wish.n, ready
            )
        sampling = wish.sampling(most, base.eos_ids, logprobs=asked.logprobs)
        alias = wish.model if wish.model != served.name else ""
        items = peer.connection.stream("serve", Generate(served.name, made, sampling, alias))
        first = await _following(items)
        return Generation(served, base, ranking, made, completions, first, items, counted, wish.n)


async def _nothing() -> AsyncGenerator[Any, None]:
    return
    yield


async def _tokenized(wish: Wish, asked: Asked, base: Base) -> list[list[int]]:
    """The prompts. Raises what `asked.tokenize` raises."""
    if isinstance(wish, ChatWish):
        async with base.rendering:
            return await asyncio.to_thread(asked.tokenize, base)
    return asked.tokenize(base) if asked.size < _INLINE else await asyncio.to_thread(asked.tokenize, base)


async def _following(items: AsyncGenerator[Any, None]) -> Any:
    """The next one. Raises PoolLost when the pool says nothing for too long."""
    try:
        async with asyncio.timeout(POOL_SECONDS):
            return await anext(items)
    except TimeoutError:
        raise PoolLost(f"the pool said nothing for {POOL_SECONDS:.0f} s", hint="Ask again.") from None


async def gathered(generation: Generation) -> Sequence[Piece]:
    """Each completion as one piece, in order, with everything that is wanted."""
    if generation.ready is not None:
        return generation.ready
    texts: list[list[str]] = [[] for _ in generation.completions]
    tokens: list[list[Token]] = [[] for _ in generation.completions]
    finishes: list[str | None] = [None for _ in generation.completions]
    async with aclosing(generation.pieces(streams=False)) as all_pieces:
        async for pieces in all_pieces:
            for piece in pieces:
                texts[piece.index].append(piece.text)
                tokens[piece.index] += piece.tokens
                finishes[piece.index] = piece.finish or finishes[piece.index]
    found = [Piece(index, "".join(text), tokens[index], finishes[index]) for index, text in enumerate(texts)]
    return await after_sampling(generation.ranking, found)
