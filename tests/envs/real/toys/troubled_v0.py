"""An environment of the old API whose episodes end as their rows say, see `troubled.py`."""

import verifiers as vf
from datasets import Dataset
from troubled import FAULTS, Trouble, rows


class Troubled(vf.MultiTurnEnv):
    def __init__(self, trouble, **kwargs):
        super().__init__(**kwargs)
        self.trouble = trouble

    async def setup_state(self, state, **kwargs):
        self.trouble.begin(state["answer"])
        return state

    async def env_response(self, messages, state, **kwargs):
        await self.trouble.befall(state["answer"])
        return [vf.UserMessage(content="Again, please.")]


def load_environment(noted: str, count: int, faults: tuple[str, ...] = tuple(FAULTS), held: int = 0):
    data = [{"question": f"Row {n}.", "answer": row} for n, row in enumerate(rows(count, faults))]
    rubric = vf.Rubric(funcs=[lambda **kwargs: 1.0])
    trouble = Trouble(noted, count, held)
    return Troubled(trouble, dataset=Dataset.from_list(data), rubric=rubric, max_turns=2)
