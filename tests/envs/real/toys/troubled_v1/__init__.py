"""A taskset whose episodes end as their rows say, see `troubled.py`; its harness is no process of its own."""

import httpx
import verifiers.v1 as vf
from troubled import Trouble, rows

__all__ = ["TroubledHarness", "TroubledTaskset"]


class TroubledData(vf.TaskData):
    answer: str
    noted: str
    count: int


class TroubledTask(vf.Task[TroubledData]):
    @vf.reward(weight=1.0)
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns / 2


class TroubledConfig(vf.TasksetConfig):
    noted: str
    count: int
    faults: list[str]


class TroubledTaskset(vf.Taskset[TroubledTask, TroubledConfig]):
    def load(self) -> list[TroubledTask]:
        config = self.config
        about = {"noted": config.noted, "count": config.count}
        return [
            TroubledTask(TroubledData(prompt=f"Row {n}.", answer=row, **about), config.task)
            for n, row in enumerate(rows(config.count, config.faults))
        ]


class TroubledHarness(vf.Harness[vf.HarnessConfig]):
    """Asks twice, as `null` does, in the process of the environment."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        task = trace.task.data
        trouble = Trouble(task.noted, task.count)
        trouble.begin(task.answer)
        chat = [{"role": "user", "content": task.prompt}]
        headers = {"Authorization": f"Bearer {secret}", "Connection": "close"}  # turns may be a minute apart
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            for turn in range(2):
                body = {"model": ctx.model, "messages": chat}
                answer = (await client.post("/chat/completions", json=body)).raise_for_status().json()
                chat += [answer["choices"][0]["message"], {"role": "user", "content": "Again, please."}]
                if turn == 0:
                    await trouble.befall(task.answer)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
