"""Asks the daemon about the runs that models are: make one, resume it, park it, see how it is."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lorad.box.config import TinkerSettings
from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.models.facts import read_facts
from lorad.protocol.served import Served
from lorad.records.runs import Run
from lorad.records.versions import LoadedModel
from lorad.states import EndReason, RunState
from lorad.tinker.door.state import Lora, Model

T = TypeVar("T")

_SECONDS = 120.0  # for the daemon to check a spec
_CALLS = 8  # at once
_FRESH = 1.0  # seconds for which what the daemon said holds
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BASE = "base"  # what pools call the model without an adapter
_FINAL = (EndReason.COMPLETED, EndReason.STOPPED, EndReason.KILLED, EndReason.ATTESTATION_FAILED)
_SOURCE = "the Tinker door"  # of specs, in messages
_STEPS = 1_000_000  # more than any client makes
_ALPHA = 32.0  # Tinker's, whatever the rank


class Runs:
    """Safe to use from the event loop: each request is in a thread."""

    def __init__(self, home: Home, settings: TinkerSettings, client: Client | None = None) -> None:
        self.home, self.settings = home, settings
        self.client = client or Client(home, timeout=_SECONDS)
        self._threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="daemon")
        self._seen: dict[str, tuple[float, Run | None]] = {}

    def directory(self, run: str) -> Path:
        """Return where the logs of a run's model are."""
        return self.home.run(run).tinker

    async def ask(self, work: Callable[..., T], *arguments: Any) -> T:
        """Raises LoradError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*arguments))

    async def create(self, model: Model, base: str) -> None:
        """Have the run of a model, once. Raises LoradError: the spec is not usable, no daemon answers."""
        if await self.find(model.run) is not None:
            return
        text = json.dumps(spec_of(model, base, await self._positions(base)))

        def make() -> Run:
            return self.client.run(
                text,
                source=_SOURCE,
                cwd=str(self.home.root),
                overrides=self.settings.overrides,
                name=model.run,
            )

        await self.ask(make)
        self._seen.pop(model.run, None)

    async def bring_up_base(self, base: str) -> Served:
        """Have a pool of a base, in whose directory it is. Raises LoradError."""
        text = json.dumps(_spec_of_base(base, await self._positions(base)))

        def start() -> LoadedModel:
            return self.client.serving_base(
                text, source=_SOURCE, cwd=str(self.home.root), overrides=self.settings.overrides
            )

        made = await self.ask(start)
        return Served(BASE, 0, "", made.model_path, made.socket)

    async def _positions(self, base: str) -> int:
        """Return the tokens for which there is room. Raises LoradError."""
        facts = await self.ask(read_facts, Path(base))
        return min(facts.max_positions, self.settings.context)

    async def find(self, run: str) -> Run | None:
        """See how a run is now; None where there is none. Raises LoradError."""
        at, known = self._seen.get(run, (float("-inf"), None))
        if time.monotonic() - at < _FRESH:
            return known
        found = await self.ask(self.client.named, [run])
        self._seen[run] = time.monotonic(), found[0] if found else None
        return self._seen[run][1]

    async def park(self, run: str) -> None:
        """Pause the run: it saves its state and gives its slot back, until `unpark`. Raises LoradError."""
        there = await self.find(run)
        if there is not None and not RunState(there.state).is_over:
            await self.ask(self.client.pause, run)
            self._seen.pop(run, None)

    async def unpark(self, run: str) -> bool:
        """Resume the run if it is paused; False while it is still about to be. Raises LoradError."""
        there = await self.find(run)
        if there is not None and there.state == RunState.STOPPING:
            return False
        if there is not None and there.state == RunState.PAUSED:
            await self.ask(self.client.resume, run)
            self._seen.pop(run, None)
        return True

    async def reason(self, run: str) -> tuple[str, bool]:
        """Say why the run does not work, "" where it does, and whether somebody ended it."""
        try:
            there = await self.find(run)
        except LoradError as error:
            return f"lorad: {error.message}", False
        if there is None:
            return f"run {run} was removed", True
        if there.state == RunState.QUEUED:
            return f"run {run} is queued: {there.waiting or 'it starts soon'}", False
        if there.state in (RunState.STARTING, RunState.RUNNING):
            return "", False
        if there.state == RunState.ENDED:
            words = f"run {run} ended ({there.reason}): {there.detail}".removesuffix(": ")
            return f"{words}. `lorad resume {run}` continues it", there.reason in _FINAL
        return f"run {run} is {there.state}: `lorad resume {run}` continues it", False

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def spec_of(model: Model, base: str, context: int) -> dict[str, Any]:
    """Return the spec of the run of a model. base: its directory. context: tokens there is room for."""
    lora = {"rank": model.lora.rank, "alpha": _ALPHA} | _targets(model.lora)
    return _spec_of_base(base, context) | {"seed": model.lora.seed or 0, "lora": lora}


def _spec_of_base(base: str, context: int) -> dict[str, Any]:
    """Return what the specs of all models of a base have."""
    return {
        "model": {"path": base},
        "algorithm": "tinker",
        "trainer": {"steps": _STEPS},
        "data": {"max_sample_tokens": context},
        "eval": {"every": 0},
        "checkpoint": {"every": 20, "keep": 2, "keep_versions": 0},
        "resources": {"restart": "on-failure", "max_restarts": _STEPS},
    }


def _targets(lora: Lora) -> dict[str, Any]:
    if lora.train_attn and lora.train_mlp:
        return {"target_modules": "all-linear"}
    if lora.train_attn:
        return {"target_modules": _ATTENTION}
    return {"target_modules": "all-linear", "exclude_modules": [*_ATTENTION, "lm_head"]}
