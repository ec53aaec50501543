"""An environment of the old API whose episodes end as their rows say, once `count` of them have begun.

Once `held` have begun, one waits for ever, and leaves the number of its process beside `noted`.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import verifiers as vf
from datasets import Dataset

FAULTS = {
    "kills": lambda: os.kill(os.getpid(), 9),
    "blocks": lambda: time.sleep(600),
    "waits": int,
}


class Troubled(vf.MultiTurnEnv):
    def __init__(self, noted, count, held, **kwargs):
        super().__init__(**kwargs)
        self.noted, self.count, self.held = Path(noted), count, held

    async def setup_state(self, state, **kwargs):
        with self.noted.open("a") as lines:
            lines.write(f"{os.getpid()} {time.process_time()} {state['answer']}\n")
        return state

    async def env_response(self, messages, state, **kwargs):
        if self.is_held():
            await asyncio.sleep(600)
        while self.begun() < self.count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        FAULTS.get(state["answer"].split()[0], int)()
        if state["answer"].startswith("waits"):
            await asyncio.sleep(600)
        return [vf.UserMessage(content="Again, please.")]

    def begun(self):
        return self.noted.read_bytes().count(b"\n")

    def is_held(self):
        if not 0 < self.held <= self.begun():
            return False
        with contextlib.suppress(FileExistsError):
            Path(f"{self.noted}.waits").symlink_to(str(os.getpid()))
            return True
        return False


def load_environment(noted: str, count: int, faults: tuple[str, ...] = tuple(FAULTS), held: int = 0):
    answers = [f"{name} {n}" for n, name in enumerate([*faults, *["answers"] * (count + 9)])]
    rows = [{"question": f"Row {n}.", "answer": answer} for n, answer in enumerate(answers)]
    rubric = vf.Rubric(funcs=[lambda **kwargs: 1.0])
    return Troubled(noted, count, held, dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2)
