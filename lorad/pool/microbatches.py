"""How large micro-batches are, where the spec leaves it open: by the memory that the bases leave on a device.

Equal machines choose equally, whatever else is in their memory at the moment, so that a resume computes the
same bits.
"""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lorad.backends.activations import ADAPTERS, LEAST, MOST, MOST_SQUARED, PLENTY, kept, on_cpu
from lorad.box.machine import NO_LIMIT, read_machine
from lorad.models.directory import BYTES
from lorad.models.facts import ModelFacts
from lorad.pool.capacity import dtype_of, memory_left, trainer_bytes
from lorad.protocol.calls import Open
from lorad.protocol.pool_setup import PoolSetup
from lorad.trainers.builtin.lent import CacheLender

_LENT = 0.66
"""How much of an engine's cache can be lent: beginnings of prompts, copies of adapters and prompts that rows
share, an eighth each, stay where they are."""


class Room(Struct, frozen=True):
    """What there is for activations on each device.

    Attributes:
        bytes: The bytes for activations, 0 where they are not known.
        token: The bytes that a token keeps.
        dropout: How many more bytes a token keeps with dropout, or DoRA.
        recomputed: The bytes that a token keeps with activation checkpointing, one layer's included.
        most: The most tokens of a micro-batch.
        is_mixed: Whether micro-batches that fit keep their activations beside others that recompute them;
            ranks would have to agree on it.
        plenty: The tokens of a micro-batch that keep the device busy. Where fewer fit, larger ones that
            recompute activations are quicker.
        lent: The bytes for activations beside these while the engine needs no keys and values.
    """

    bytes: int = 0
    token: int = 0
    dropout: int = 0
    recomputed: int = 0
    most: int = MOST
    is_mixed: bool = False
    plenty: int = 0
    lent: int = 0


def room_for(config: PoolSetup, facts: ModelFacts) -> Room:
    ranks = config.ranks
    parts = 1 if ranks is None else ranks.tp * ranks.pp * ranks.cp
    each = kept(facts, BYTES[dtype_of(config, facts)], parts)
    # without Transformer Engine, as on a CPU, and in Transformer Engine where no fused kernel has the dtype,
    # Megatron's attention holds tokens x tokens
    is_plain = config.device == "cpu" or dtype_of(config, facts) == "float32"
    most = MOST_SQUARED if config.trainer == "megatron" and is_plain else MOST
    plenty = 0 if config.device == "cpu" else PLENTY
    room = Room(_bytes(config, facts), each.token, each.dropout, each.recomputed, most, ranks is None, plenty)
    is_builtin = ranks is None and not (config.trainer_class or config.engine_class)
    if config.device == "cpu" or config.mode != "fused" or config.deterministic or not is_builtin:
        return room
    return replace(room, lent=int(_LENT * max(0, memory_left(config, facts)) / 2))


def choose_sizes(args: Open, room: Room) -> Open:
    """Fill in what `args` leaves open. Samples that are longer than a micro-batch have one of their own, in
    which activations are recomputed where only that fits.
    """
    token = room.token + room.dropout * bool(args.dropout or args.dora)
    if not room.bytes or not token:
        return replace(
            args,
            tokens_per_microbatch=args.tokens_per_microbatch or room.most,
            activation_checkpointing=bool(args.activation_checkpointing),
        )
    fits = room.bytes // token
    least = max(args.longest, args.tokens_per_microbatch or LEAST)
    checkpointing = args.activation_checkpointing
    kept = 0
    lent = 0
    is_idle = checkpointing is None and not args.tokens_per_microbatch and fits < room.plenty
    if checkpointing is None:
        checkpointing = fits < least or is_idle
        kept = fits if checkpointing and room.is_mixed and fits >= LEAST else 0
    if checkpointing and (is_idle or not kept):
        fits = room.bytes // max(1, room.recomputed)
        lent = (kept + room.lent // token) // LEAST * LEAST
    # by powers of two on a CPU, which is as quick with small ones
    whole = fits // LEAST * LEAST if room.plenty else 1 << max(0, fits.bit_length() - 1)
    tokens = args.tokens_per_microbatch or max(LEAST, min(room.most, whole))
    is_worth_it = room.lent and is_idle and max(room.plenty, least) <= lent < tokens
    return replace(
        args,
        tokens_per_microbatch=tokens,
        activation_checkpointing=checkpointing,
        kept_tokens=kept,
        lent_tokens=lent if is_worth_it else 0,
    )


def lend_cache(trainer: Any, engine: Any, room: Room) -> None:
    """Lend the builtin engine's cache to the trainer's micro-batches while the engine does not need it."""
    if room.lent:
        trainer.lender = CacheLender(engine.lend, room.lent, room.token, room.dropout)


def _bytes(config: PoolSetup, facts: ModelFacts) -> int:
    """Return the bytes that bases, adapters and engine leave for activations on each device."""
    if config.device == "cpu":
        granted = read_machine().memory
        if granted >= NO_LIMIT:
            return 0
        ranks = 1 if config.ranks is None else config.ranks.ranks
        dtype = dtype_of(config, facts)
        whole = facts.bytes(dtype, config.quantize)
        if config.mode != "fused":
            whole += facts.bytes(dtype)
        return on_cpu(granted * config.memory_fraction, whole, ranks)
    if config.nodes is not None:
        return 0
    left = memory_left(config, facts)
    if config.mode == "fused":
        return max(0, left // 2 - left // ADAPTERS)  # half is for keys and values
    if config.mode == "resident":
        left -= int(left + trainer_bytes(config, facts)) // 2
    return max(0, left - left // ADAPTERS)
