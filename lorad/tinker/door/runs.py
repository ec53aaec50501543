"""Asks the daemon about the runs of models: makes them, resumes them, parks them, sees how they are."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorad.box.config import TinkerSettings
from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.models.facts import read_facts
from lorad.protocol.served import Served
from lorad.records.runs import Run
from lorad.states import EndReason, RunState
from lorad.tinker.door.state import Model

T = TypeVar("T")

_SECONDS = 120.0  # for the daemon to check a spec
_CALLS = 8  # at once
_FRESH = 1.0  # seconds for which an answer of the daemon holds
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BASE = "base"  # what pools call the model without an adapter
_FINAL = (EndReason.COMPLETED, EndReason.STOPPED, EndReason.KILLED, EndReason.ATTESTATION_FAILED)
_SOURCE = "the Tinker door"  # of specs, in messages
_STEPS = 1_000_000  # more than any client makes
_ALPHA = 32.0  # Tinker's, whatever the rank


class Runs:
    """Asks the daemon in threads, for callers on the event loop."""

    def __init__(self, home: Home, settings: TinkerSettings, client: Client | None = None) -> None:
        self.home = home
        self.settings = settings
        self.client = client or Client(home, timeout=_SECONDS)
        self._threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="daemon")
        self._answers: dict[str, tuple[float, Run | None]] = {}

    async def ask(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work in a thread. Raises LoradError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*arguments))

    async def create(self, model: Model, base: str) -> None:
        """Make the run of a model, once. Raises LoradError: the spec is not usable, no daemon answers."""
        if await self.find(model.run) is not None:
            return
        lora: dict[str, Any] = {"rank": model.lora.rank, "alpha": _ALPHA, "target_modules": "all-linear"}
        if not model.lora.train_attn:
            lora["exclude_modules"] = [*_ATTENTION, "lm_head"]
        elif not model.lora.train_mlp:
            lora["target_modules"] = _ATTENTION
        more = {"seed": model.lora.seed or 0, "lora": lora}
        await self._ask_with_spec(partial(self.client.run, name=model.run), base, more)
        self._answers.pop(model.run, None)

    async def bring_up_base(self, base: str) -> Served:
        """Have a pool started for the base in a directory. Raises LoradError."""
        loaded = await self._ask_with_spec(self.client.serving_base, base, {})
        return Served(BASE, 0, "", loaded.model_path, loaded.socket)

    async def _ask_with_spec(self, call: Callable[..., T], base: str, more: dict[str, Any]) -> T:
        """Make a call of the client with the spec of a base and `more` keys. Raises LoradError."""
        facts = await self.ask(read_facts, Path(base))
        spec = {
            "model": {"path": base},
            "algorithm": "tinker",
            "trainer": {"steps": _STEPS},
            "data": {"max_sample_tokens": min(facts.max_positions, self.settings.context)},
            "eval": {"every": 0},
            "checkpoint": {"every": 20, "keep": 2, "keep_versions": 0},
            "resources": {"restart": "on-failure", "max_restarts": _STEPS},
        }
        about = {"source": _SOURCE, "cwd": str(self.home.root), "overrides": self.settings.overrides}
        return await self.ask(partial(call, json.dumps(spec | more), **about))

    async def find(self, run: str) -> Run | None:
        """See how a run is now; None where there is no such run. Raises LoradError."""
        seen_at, row = self._answers.get(run, (float("-inf"), None))
        if time.monotonic() - seen_at < _FRESH:
            return row
        rows = await self.ask(self.client.named, [run])
        self._answers[run] = time.monotonic(), rows[0] if rows else None
        return self._answers[run][1]

    async def park(self, run: str) -> None:
        """Pause the run: it saves its state and gives its slot back, until `unpark`. Raises LoradError."""
        row = await self.find(run)
        if row is not None and not RunState(row.state).is_over:
            await self.ask(self.client.pause, run)
            self._answers.pop(run, None)

    async def unpark(self, run: str) -> bool:
        """Resume the run if it is paused; return False while it is still stopping. Raises LoradError."""
        row = await self.find(run)
        if row is not None and row.state == RunState.STOPPING:
            return False
        if row is not None and row.state == RunState.PAUSED:
            await self.ask(self.client.resume, run)
            self._answers.pop(run, None)
        return True

    async def reason(self, run: str) -> tuple[str, bool]:
        """Say why the run does not work, "" where it does, and whether somebody ended it."""
        try:
            row = await self.find(run)
        except LoradError as error:
            return f"lorad: {error.message}", False
        if row is None:
            return f"run {run} was removed", True
        if row.state == RunState.QUEUED:
            return f"run {run} is queued: {row.waiting or 'it starts soon'}", False
        if row.state in (RunState.STARTING, RunState.RUNNING):
            return "", False
        if row.state == RunState.ENDED:
            words = f"run {run} ended ({row.reason}): {row.detail}".removesuffix(": ")
            return f"{words}. `lorad resume {run}` continues it", row.reason in _FINAL
        return f"run {run} is {row.state}: `lorad resume {run}` continues it", False

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
