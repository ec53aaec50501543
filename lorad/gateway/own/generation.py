"""Runs one request in the pool: opens it for the version that its name means, then yields its completions."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorad.errors import EngineGone, NotFound, PoolLost
from lorad.gateway.errors import refused
from lorad.gateway.limits import POOL_SECONDS
from lorad.gateway.own.bases import Base, Bases, Peers, next_item
from lorad.gateway.own.prompts import new_tokens, prompts
from lorad.gateway.own.ranking import Piece, Ranking, Token, after_sampling
from lorad.gateway.own.resolve import Resolver
from lorad.gateway.own.text import Detokenizer, StopCutter
from lorad.gateway.params import UNSUPPORTED, ChatWish, Wish
from lorad.gateway.traffic import Counted
from lorad.protocol.batch import Chunk, Chunks, Prompt, Sampling
from lorad.protocol.calls import Generate
from lorad.protocol.served import Served
from lorad.servers.table import SERVERS

_INLINE = 1 << 14  # bytes of a request whose tokens are made without another thread

_Tokenize = Callable[[Base], list[list[int]]]


@dataclass
class _Completion:
    """One of the completions that a request asked for.

    Attributes:
        tokens: How many tokens the pool has sent.
        length: How many characters were passed on.
    """

    index: int
    base: Base
    detokenizer: Detokenizer
    cutter: StopCutter
    tokens: int = 0
    length: int = 0

    def take(self, chunk: Chunk) -> Piece:
        """Turn what the pool sent into text. Raises PoolLost when the pool ended the completion early."""
        if chunk.finish == "abort":
            raise PoolLost("the pool ended the request early", hint="Ask again.")
        tokens = chunk.tokens.tolist()
        self.tokens += len(tokens)
        ends = chunk.finish == "stop" and tokens and tokens[-1] in self.base.eos_ids
        spoken = tokens[:-1] if ends else tokens
        text = ""
        described = []
        for place, token in enumerate(tokens):
            offset = self.length + len(text)
            described.append(Token(token, self.base.token_text(token), float(chunk.logprobs[place]), offset))
            if place < len(spoken):
                text += self.cutter.add(self.detokenizer.add(token))
        if chunk.finish is not None:
            text += self.cutter.add(self.detokenizer.rest())
            text += self.cutter.rest()
        self.length += len(text)
        finish = "stop" if chunk.finish and self.cutter.is_cut else chunk.finish
        return Piece(self.index, text, described, finish)


@dataclass
class Generation:
    """A request under way.

    Attributes:
        first: The first item that the pool sent.
        items: The items that the pool sends after it.
        ready: The answer, where nothing is sampled.
    """

    served: Served
    base: Base
    ranking: Ranking
    prompts: list[Prompt]
    completions: list[_Completion]
    first: Any
    items: AsyncGenerator[Any, None]
    counted: Counted
    per_prompt: int = 1
    ready: list[Piece] | None = None

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens were read and sampled, with the tokens of stop strings."""
        read = sum(prompt.tokens.size for prompt in self.prompts)
        sampled = sum(completion.tokens for completion in self.completions)
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    def prompt_of(self, index: int) -> list[int]:
        """Return the prompt of a completion, as tokens."""
        tokens: list[int] = self.prompts[index // self.per_prompt].tokens.tolist()
        return tokens

    async def pieces(self, *, streams: bool) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces that the pool sent together, ready to be sent on if the answer `streams`.

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
                self.counted.count_tokens(sum(len(piece.tokens) for piece in pieces))
                if streams and self.ranking.ranks:
                    pieces = await after_sampling(self.ranking, pieces)
                yield pieces
                item = await next_item(self.items, POOL_SECONDS)


class RequestFacts(NamedTuple):
    """Facts about a request that its wish does not have.

    Attributes:
        size: Its bytes.
        version: The version that its name means, where the front has looked that up.
    """

    tokenize: _Tokenize
    size: int
    version: str | None = None


@dataclass
class Generator:
    """Opens generations."""

    resolver: Resolver
    bases: Bases = field(default_factory=Bases)
    peers: Peers = field(default_factory=Peers)

    async def open(self, wish: Wish, facts: RequestFacts, counted: Counted) -> Generation:
        """Start a generation and return once the pool has sent its first item.

        If the version is gone, the name is looked up once more, as nothing has been sent. Raises ApiError,
        LoradError.
        """
        version = facts.version
        served = await self.resolver.find(version or wish.model)
        try:
            return await self._begin(served, wish, facts, counted)
        except (NotFound, PoolLost, EngineGone):
            if version is None or wish.model in self.resolver.table.names().aliases:
                version = wish.model
            served = await self.resolver.find_another(version, served)
        return await self._begin(served, wish, facts, counted)

    async def _begin(self, served: Served, wish: Wish, facts: RequestFacts, counted: Counted) -> Generation:
        counted.serves(wish.model, served.name)
        if served.socket is None:
            raise PoolLost(f"no pool serves {served.name} now", hint="Ask again.")
        base = await self.bases.get(served.model_path)
        peer = await self.peers.get(served.socket)
        if isinstance(wish, ChatWish):
            async with base.rendering:
                tokens = await asyncio.to_thread(facts.tokenize, base)
        elif facts.size < _INLINE:
            tokens = facts.tokenize(base)
        else:
            tokens = await asyncio.to_thread(facts.tokenize, base)
        engine = peer.info.engine
        if wish.schema and not peer.info.formats:
            hint = SERVERS[engine].schema_hint if engine in SERVERS else ""
            why = f"the engine {engine} of this version follows no JSON schema. {hint}".rstrip()
            raise refused("response_format", why, UNSUPPORTED)
        most = new_tokens(wish, tokens, base, peer.info.max_tokens)
        seeded = prompts(wish, tokens)
        ranking = Ranking(wish, peer, served.name, base, seeded)
        decode = base.tokenizer.with_calls if wish.offered() else base.tokenizer.decode
        completions = [
            _Completion(index, base, Detokenizer(decode), StopCutter(wish.stops))
            for index in range(len(seeded) * wish.n)
        ]
        sampling = Sampling(
            max_new_tokens=most,
            temperature=wish.temperature,
            top_p=wish.top_p,
            top_k=max(wish.top_k, 0),
            stop_token_ids=base.eos_ids,
            stop=wish.stops,
            stream=wish.stream,
            logprobs=wish.wants_logprobs,
            schema=wish.schema,
        )
        alias = wish.model if wish.model != served.name else ""
        items = peer.connection.stream("serve", Generate(served.name, seeded, sampling, alias))
        first = ready = None
        if most:
            first = await next_item(items, POOL_SECONDS)
        else:  # the pool is not asked
            ready = await ranking.completed([Piece(part.index, "", [], "length") for part in completions])
        return Generation(served, base, ranking, seeded, completions, first, items, counted, wish.n, ready)


async def gathered(generation: Generation) -> Sequence[Piece]:
    """Return each completion as one piece, in order, with everything that was asked for."""
    if generation.ready is not None:
        return generation.ready
    parts: list[list[Piece]] = [[] for _ in generation.completions]
    async with aclosing(generation.pieces(streams=False)) as all_pieces:
        async for pieces in all_pieces:
            for piece in pieces:
                parts[piece.index].append(piece)
    whole = []
    for index, own in enumerate(parts):
        finish = next((piece.finish for piece in reversed(own) if piece.finish), None)
        tokens = [token for piece in own for token in piece.tokens]
        whole.append(Piece(index, "".join(piece.text for piece in own), tokens, finish))
    return await after_sampling(generation.ranking, whole)
