"""A verifiers taskset of the new API (0.4): one question, one answer, played by the `null` harness."""

import verifiers.v1 as vf

__all__ = ["ToyTaskset"]


class ToyData(vf.TaskData):
    answer: str


class ToyTask(vf.Task[ToyData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ToyConfig(vf.TasksetConfig):
    rows: int = 6


class ToyTaskset(vf.Taskset[ToyTask, ToyConfig]):
    def load(self) -> list[ToyTask]:
        return [
            ToyTask(ToyData(prompt=f"What is {n} + {n}?", answer=str(2 * n)), self.config.task)
            for n in range(1, self.config.rows + 1)
        ]
