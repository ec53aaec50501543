"""What a run asks of the server that it samples from: the same for runs that can share one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lorad.adapters.targets import leaf
from lorad.backends.engine_install import install_hint
from lorad.box.config import Backend
from lorad.errors import SpecError
from lorad.protocol.preflight import BaseFacts
from lorad.protocol.servers import ServerSetup
from lorad.spec.model import Spec

RANKS = (16, 32, 64, 128, 256, 320, 512)  # what vLLM takes; more of them would only make more pools
CANARY_PROMPT = 8  # tokens, see lorad/pool/attest/canaries.py
HEAD = "lm_head"


def server_setup(spec: Spec, backend: Backend, facts: BaseFacts, cwd: Path) -> ServerSetup:
    """Raises SpecError when the backend has no interpreter, or the rank is more than any server takes."""
    rollout = spec.rollout
    if backend.python is None and not rollout.urls:
        raise SpecError(
            f"config.yaml names no python for {rollout.backend}",
            key="rollout.backend",
            hint=install_hint(rollout.backend),
        )
    return ServerSetup(
        python="" if rollout.urls else str(backend.python),
        env={} if rollout.urls else backend.env,
        servers=len(rollout.urls) or rollout.servers,
        tp=rollout.tp,
        max_rank=max_rank(spec.lora.rank),
        targets=targets(facts.modules, facts.linears),
        context_length=context_length(spec, facts.max_positions),
        scaled_logprobs=rollout.temperature != 1.0,
        urls=rollout.urls,
        key_file=absolute(rollout.key_file, cwd),
        admin_key_file=absolute(rollout.admin_key_file, cwd),
        engine_args=rollout.engine_args,
    )


def max_rank(rank: int) -> int:
    if rank > RANKS[-1]:
        raise SpecError(
            f"{rank} is more than the {RANKS[-1]} that servers take", key="lora.rank", hint="Lower it."
        )
    return next(most for most in RANKS if most >= rank)


def targets(modules: Iterable[str], linears: Iterable[str]) -> tuple[str, ...]:
    """Leaf names, sorted: those of all linears but the head, so that runs with fewer share the server; else
    its own.
    """
    own, usual = {leaf(module) for module in modules}, set(linears) - {HEAD}
    return tuple(sorted(usual if own <= usual else own))


def longest(spec: Spec) -> int:
    """Tokens that a server needs room for: a prompt and its sample, or a canary and one token more to score
    it.
    """
    sample = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    return max(sample, CANARY_PROMPT + spec.attest.tokens + 1)


def context_length(spec: Spec, positions: int) -> int:
    """Return the next power of two, so that runs of about the same length share the server; at most the
    base's positions.
    """
    return min(1 << (longest(spec) - 1).bit_length(), positions)


def absolute(path: str | None, cwd: Path) -> str | None:
    return None if path is None else str(cwd / Path(path).expanduser())
