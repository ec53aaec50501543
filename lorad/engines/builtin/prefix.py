"""Keys and values of prompts seen before, block by block, under the identity of the version that made them;
and prompts through the model, beginning where these end.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from lorad.engines.builtin.calls import HeldLora, SampleGroup
from lorad.models.decoder import hidden, logits
from lorad.models.experts import Recording, route_shape
from lorad.models.kv import ExtendAttention, KVCache, PrefillAttention
from lorad.models.merge import Merger
from lorad.models.ops import upload
from lorad.routes import RouteShape

BLOCK = 64  # tokens


class _Block(NamedTuple):
    """The keys and values of one block of tokens.

    Attributes:
        layers: Keys and values of each layer.
        routes: The routes of the block's tokens, where the base is a mixture.
        states: The states of gated delta nets after the block, where they are kept; they are as large as the
            keys and values of many blocks.
    """

    layers: list[torch.Tensor]
    routes: np.ndarray | None
    states: Sequence[torch.Tensor] = ()

    @property
    def bytes(self) -> int:
        routes = 0 if self.routes is None else self.routes.nbytes
        return sum(part.nbytes for part in (*self.layers, *self.states)) + routes


class PrefixCache:
    """Keys and values of prompt prefixes, in blocks; the least recently used ones are dropped first.

    A block's key holds the version and every token up to its end.
    version: what distinguishes versions: the digest of the tensors and the scale that they are used with.
    Filled from and read into `KVCache`s; an entry is [layers x (k and v), kv heads, BLOCK, head_dim].
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def find(self, version: str, tokens: np.ndarray) -> list[bytes]:
        """Return the keys of the leading blocks that are kept, without the block of the last token:
        something must be computed.
        """
        keys = _keys(version, tokens[:-1])
        leading = keys[
            : next((number for number, key in enumerate(keys) if key not in self.blocks), len(keys))
        ]
        for key in reversed(leading):  # the beginning outlives the end: without it the end is never found
            self.blocks.move_to_end(key)
        return leading

    def read(self, keys: list[bytes], cache: KVCache, slot: int) -> None:
        """Put these blocks at the beginning of a slot."""
        if keys:
            cache.states.restore(slot, self.blocks[keys[-1]].states)
        for number, key in enumerate(keys):
            place = slice(number * BLOCK, (number + 1) * BLOCK)
            for layer, block in zip(cache.layers, self.blocks[key].layers, strict=True):
                layer[:, slot, :, place] = block

    def routes(self, keys: list[bytes]) -> list[np.ndarray]:
        """Return the routes of the tokens of these blocks."""
        return [routes for key in keys if (routes := self.blocks[key].routes) is not None]

    def write(
        self,
        version: str,
        tokens: np.ndarray,
        cache: KVCache,
        slot: int,
        routes: np.ndarray | None = None,
        states: Mapping[int, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """Keep the whole blocks of a slot that holds these tokens, the first ones if not all fit.

        states: The states of gated delta nets after so many tokens.
        """
        most = self.most_bytes // _Block([layer[:, slot, :, :BLOCK] for layer in cache.layers], None).bytes
        for number, key in reversed(list(enumerate(_keys(version, tokens)[:most]))):
            if key not in self.blocks:
                place = slice(number * BLOCK, (number + 1) * BLOCK)
                layers = [layer[:, slot, :, place].clone() for layer in cache.layers]
                self.blocks[key] = _Block(layers, None if routes is None else routes[place].copy())
                self.bytes += self.blocks[key].bytes
            after = states.get((number + 1) * BLOCK, ())
            if after and not self.blocks[key].states:
                self.blocks[key] = self.blocks[key]._replace(states=after)
                self.bytes += sum(part.nbytes for part in after)
            self.blocks.move_to_end(key)
        while self.bytes > self.most_bytes:
            self.bytes -= self.blocks.popitem(last=False)[1].bytes


def _keys(version: str, tokens: np.ndarray) -> list[bytes]:
    """A chain of sha256: each covers the version and all tokens up to the end of its block."""
    state = hashlib.sha256(version.encode())
    keys = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        state.update(tokens[start : start + BLOCK].astype(np.int32).tobytes())
        keys.append(state.digest())
    return keys


class _Prefilled(NamedTuple):
    """What the prompts of groups gave.

    Attributes:
        logits: The logits after each prompt, [groups, vocab].
        cache: The keys and values, with one slot per prompt.
        routes: The routes of each prompt's tokens; empty where the base is no mixture or nobody wants them.
    """

    logits: torch.Tensor
    cache: KVCache
    routes: list[np.ndarray]


def prefill(
    models: Merger, groups: Sequence[SampleGroup], version: HeldLora, prefixes: PrefixCache | None
) -> _Prefilled:
    """Compute the prompts of groups, all under one version.

    States of gated delta nets are kept at one place of each prompt: where it leaves what is known of others,
    as more may leave there, or else at its last whole block.
    """
    cached = [prefixes.find(version.identity, group.tokens) if prefixes else [] for group in groups]
    marks = [0] * len(groups)
    if prefixes and models.base.config.delta is not None:
        ends = [BLOCK * len(keys) for keys in cached]
        cached = [  # gated delta nets can only go on behind a block that has states
            keys[: max((end for end, key in enumerate(keys, 1) if prefixes.blocks[key].states), default=0)]
            for keys in cached
        ]
        marks = [
            end if end > BLOCK * len(keys) else (len(group.tokens) - 1) // BLOCK * BLOCK
            for end, keys, group in zip(ends, cached, groups, strict=True)
        ]
    starts = [len(keys) * BLOCK for keys in cached]
    for group, start in zip(groups, starts, strict=True):
        if len(group.tokens) == group.prompt:  # not one that is computed again
            group.call.caller.prompts += group.prompt
            group.call.caller.cached += start
    cache = KVCache(
        models.base, len(groups), max(len(group.tokens) for group in groups) + any(starts + marks)
    )
    if prefixes:
        for slot, keys in enumerate(cached):
            prefixes.read(keys, cache, slot)
    is_wanted = prefixes is not None or any(group.call.sampling.routes for group in groups)
    shape = route_shape(models.base) if is_wanted else None
    states: list[dict[int, list[torch.Tensor]]] = [{} for _ in groups]
    routes = [prefixes.routes(keys) if prefixes else [] for keys in cached]
    begins = starts
    if any(mark > start for mark, start in zip(marks, starts, strict=True)):
        heads = [group.tokens[start:mark] for group, start, mark in zip(groups, starts, marks, strict=True)]
        _, of_heads = _forward(models, heads, starts, cache, version, shape)
        for parts, part in zip(routes, of_heads, strict=False):
            parts.append(part)
        states = [{mark: cache.states.kept(slot)} for slot, mark in enumerate(marks)]
        begins = marks
    tails = [group.tokens[begin:] for group, begin in zip(groups, begins, strict=True)]
    scores, of_tails = _forward(models, tails, begins, cache, version, shape)
    whole = [np.concatenate([*parts, part]) for parts, part in zip(routes, of_tails, strict=False)]
    if prefixes:
        for slot, group in enumerate(groups):
            its_routes = whole[slot] if whole else None
            prefixes.write(version.identity, group.tokens, cache, slot, its_routes, states[slot])
    return _Prefilled(scores, cache, whole)


def _forward(
    models: Merger,
    rest: Sequence[np.ndarray],
    starts: Sequence[int],
    cache: KVCache,
    version: HeldLora,
    shape: RouteShape | None,
) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Compute the rest of prompts behind their first `starts` tokens, which the cache holds already.

    Returns the logits after the last token of each, and the routes of what was computed where they have a
    shape.
    """
    recording = None if shape is None else Recording(shape)
    base, lora = models.alone(version.lora)
    ids = np.zeros((len(rest), max(len(row) for row in rest)), np.int64)
    for row, tokens in enumerate(rest):
        ids[row, : len(tokens)] = tokens
    positions = torch.arange(ids.shape[1], device=base.device)
    sizes = np.array([len(tokens) for tokens in rest])
    inputs, lengths, begins = upload([ids, sizes, np.array(starts)], base.device)
    attention: PrefillAttention | ExtendAttention = PrefillAttention(cache, lengths)
    if any(starts):
        attention = ExtendAttention(cache, begins, ids.shape[1], lengths)
        positions = attention.places
    states = hidden(base, inputs, positions, attention, lora, routing=recording)
    routes: list[np.ndarray] = []
    if recording is not None:
        every = np.split(recording.routes(), len(rest))
        routes = [part[: len(tokens)] for part, tokens in zip(every, rest, strict=True)]
    return logits(base, states[torch.arange(len(rest), device=base.device), lengths - 1], lora), routes
