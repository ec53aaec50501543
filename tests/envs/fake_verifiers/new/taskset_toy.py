"""A taskset as they are written for verifiers 0.4."""

import itertools

import verifiers.v1 as vf

__all__ = ["ToyTaskset"]


class BoxedTask(vf.Task):
    NEEDS_CONTAINER = True


class ToyTaskset(vf.Taskset):
    @property
    def INFINITE(self):
        return getattr(self.config, "endless", False)

    def load(self):
        kind = BoxedTask if getattr(self.config, "boxed", False) else vf.Task
        prompt = None if getattr(self.config, "silent", False) else "S:{}="
        for number in itertools.count() if self.INFINITE else range(40):
            said = prompt and prompt.format(number)
            yield kind(vf.TaskData(number=number, prompt=said, system_prompt="Be brief.", answer="right"))

    def toolsets(self, config):
        return ["a tool"] if getattr(config, "tools", False) else []
