"""The same with a tool, which verifiers serves over MCP from a process of its own."""

import verifiers.v1 as vf

from toy_tool_v1.server import AddToolset

__all__ = ["ToyToolTaskset"]


class ToolData(vf.TaskData):
    answer: str


class ToolTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ToolTask(vf.Task[ToolData, vf.State, ToolTaskConfig]):
    @classmethod
    def toolsets(cls, config: ToolTaskConfig) -> list[vf.Toolset]:
        return [AddToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def tools_used(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class ToolConfig(vf.TasksetConfig):
    rows: int = 6
    task: ToolTaskConfig = ToolTaskConfig()


class ToyToolTaskset(vf.Taskset[ToolTask, ToolConfig]):
    def load(self) -> list[ToolTask]:
        return [
            ToolTask(
                ToolData(prompt=f"What is {n} + {n}? Use the tool.", answer=str(2 * n)), self.config.task
            )
            for n in range(1, self.config.rows + 1)
        ]
