"""Try a server out: it starts on the builtin tiny model and is compared with the builtin engine."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.targets import leaf
from lorad.backends.registry import engine_class
from lorad.box.config import Backend
from lorad.children.interpreter import InterpreterFinding
from lorad.engines.base import BASE, AdapterSource
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.remote.engine import RemoteEngine
from lorad.engines.remote.settings import settings_of
from lorad.models.directory import linear_shapes, read_config, resolve
from lorad.protocol.batch import Batch, Prompt, Sampling
from lorad.protocol.pool_setup import ServerSetup

_TINY = resolve("builtin:tiny")
_SHAPES = linear_shapes(read_config(_TINY))
_RANK = 8
_MEMORY_FRACTION = 0.3  # of a GPU that others may be using
_SAMPLES = 8
_NEW_TOKENS = 32
_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}  # nats, mean: the servers were seen at 1e-7 and 2e-3
_VERSION = "trial@1"
_CANARIES = Batch.of(
    [
        (np.array([5, 9, 7, 11], np.int32), [np.array([8, 6, 10, 7, 12], np.int32), np.array([7], np.int32)]),
        (np.array([12, 4], np.int32), [np.arange(4, 20, dtype=np.int32)]),
    ]
)


def command(kind: str, backend: Backend, device: str) -> InterpreterFinding:
    """Report the command that lorad starts, so that it can be started by hand."""
    _, settings = _setup_on(backend, device)
    dialect = _remote(kind).dialect()
    argv = dialect.command(str(backend.python), settings, Path("SOCKET"))
    facts = {"argv": argv, "environment": dialect.environment(settings), "env_of_config": sorted(backend.env)}
    return InterpreterFinding("command", True, f"{len(argv)} arguments; --json lists them", facts=facts)


def _setup_on(backend: Backend, device: str) -> tuple[ServerSetup, ServerSettings]:
    targets = tuple(sorted({leaf(module) for module in _SHAPES}))
    setup = ServerSetup(
        python=str(backend.python), env=backend.env, max_rank=16, targets=targets, context_length=256
    )
    settings = settings_of(
        setup,
        model=_TINY,
        dtype="float32" if device == "cpu" else "bfloat16",
        device=device,
        threads=1,
        memory_fraction=_MEMORY_FRACTION,
        sleep=False,
    )
    return setup, settings


def _remote(kind: str) -> type[RemoteEngine]:
    engine = engine_class(kind)
    assert issubclass(engine, RemoteEngine)
    return engine


async def trial(kind: str, backend: Backend, device: str, work: Path) -> AsyncIterator[InterpreterFinding]:
    """Start a server, load an adapter, sample and score with it, and compare; yields a finding for each.

    Raises LoradError when the server does not start or refuses the adapter.
    """
    rng = np.random.default_rng(0)
    modules = tuple(sorted(module for module in _SHAPES if module != "lm_head"))
    tensors = {}
    for module in modules:
        out, into = _SHAPES[module]
        tensors[f"{module}.lora_A.weight"] = rng.normal(0, 0.1, (_RANK, into)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.normal(0, 0.1, (out, _RANK)).astype(np.float32)
    adapter = Adapter(AdapterConfig(_RANK, 2.0 * _RANK, modules), tensors)
    source = AdapterSource(adapter.digest(), adapter=adapter)
    prompt = Prompt("p", np.array([5, 9, 7, 11], np.int32), np.arange(_SAMPLES, dtype=np.uint64))
    sampling = Sampling(max_new_tokens=_NEW_TOKENS, stream=False)
    clock = _Clock()
    setup, settings = _setup_on(backend, device)
    engine = await _remote(kind).open(setup, settings, _SHAPES, work=work)
    try:
        yield clock.finding("start", "until it took requests")
        await engine.load(_VERSION, source)
        yield clock.finding("load", "for one adapter")
        chunks = engine.generate("trial", _VERSION, [prompt], sampling)
        tokens = sum([chunk.tokens.size async for chunk in chunks])
        yield clock.finding("sample", f"for {tokens} tokens of {_SAMPLES} samples")
        theirs = [await engine.score(version, _CANARIES) for version in (BASE, _VERSION)]
        yield clock.finding("score", f"for {_CANARIES.completions.size} tokens, twice")
    finally:
        await engine.close()
    yield clock.finding("stop", "until nothing of it was left")
    ours = await _builtin_scores(source)
    yield compare_scores(theirs, ours, settings.dtype)


@dataclass(eq=False)
class _Clock:
    _last: float = field(default_factory=time.monotonic)

    def finding(self, name: str, what: str) -> InterpreterFinding:
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        return InterpreterFinding(name, True, f"{seconds:.2f} s {what}", facts={"seconds": seconds})


async def _builtin_scores(source: AdapterSource) -> list[np.ndarray]:
    """Score the canaries with the base, then with the adapter, by lorad's own forward in fp32 on the CPU."""
    import torch

    from lorad.engines.builtin.engine import BuiltinEngine
    from lorad.models.compute import Compute
    from lorad.models.loading import load_base

    compute = Compute()
    engine = BuiltinEngine(load_base(_TINY, torch.float32, torch.device("cpu")), compute, _TINY)
    try:
        await engine.load(_VERSION, source)
        return [await engine.score(version, _CANARIES) for version in (BASE, _VERSION)]
    finally:
        await engine.close()
        compute.close()


def compare_scores(
    theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], dtype: str
) -> InterpreterFinding:
    """Compare base with base and adapter with adapter; NaN is a difference."""
    differences = [np.abs(a.astype(np.float64) - b) for a, b in zip(theirs, ours, strict=True)]
    base, adapter = (float(difference.max()) for difference in differences)
    limit = _LIMITS[dtype]
    ok = all(float(difference.mean()) <= limit for difference in differences)
    detail = f"differ by at most {base:.1e} (base) and {adapter:.1e} (adapter) from lorad's own, in {dtype}"
    hint = (
        "The server does not compute what lorad trains: samples would be of another policy. "
        "Another version of it, or of its kernels, may be sound."
    )
    return InterpreterFinding(
        "logprobs", ok, detail, hint, {"base": base, "adapter": adapter, "mean_limit": limit}
    )
