"""Tasksets, and environments that play their tasks."""

import asyncio
import contextlib
import copy
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar


@dataclass
class Runtime:
    type: str = "prime"


@dataclass
class HarnessConfig:
    id: str = "bash"


@dataclass
class AgentConfig:
    """The seat of an agent; `model_fields_set` has what its author or the run said."""

    harness: HarnessConfig | None = None
    runtime: Runtime = field(default_factory=Runtime)
    client: object = None
    max_turns: int | None = None
    model_fields_set: tuple = ()


class EnvConfig:
    """Narrows a block as pydantic does: an unknown key is a ValueError."""

    model_fields: ClassVar = {"agent": SimpleNamespace(default=AgentConfig())}

    def __init__(self, block):
        block = copy.deepcopy(block)
        self.taskset = SimpleNamespace(**block.pop("taskset"))
        self.agents = {}
        for name, about in self.model_fields.items():
            seat = self.agents[name] = copy.copy(about.default)
            for key, value in block.pop(name, {}).items():
                kinds = {"harness": HarnessConfig, "runtime": Runtime}
                setattr(seat, key, kinds[key](**value) if key in kinds else value)
        if block:
            raise ValueError(f"unknown keys: {', '.join(block)}")

    def __iter__(self):
        yield "taskset", self.taskset
        yield from self.agents.items()


class TaskData(SimpleNamespace):
    def model_dump_json(self, exclude_none):
        return json.dumps({key: value for key, value in vars(self).items() if value is not None})


@dataclass
class Task:
    data: TaskData
    config: object = None
    NEEDS_CONTAINER = False

    @classmethod
    def toolsets(cls, config):
        return []


class Taskset:
    INFINITE = False

    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    def toolsets(self, config):
        return []


def EvalClientConfig(**settings):
    return SimpleNamespace(**settings)


ModelContext = SamplingConfig = EvalClientConfig


class Env:
    """Plays a task by one request, and says who served it."""

    def __init__(self, config):
        self.taskset = config.taskset_class(config.taskset)
        self.agent = config.agents["agent"]
        self.is_serving = False

    @contextlib.asynccontextmanager
    async def serving(self):
        self.is_serving = True
        yield
        self.is_serving = False

    async def run_episode(self, task, context):
        assert self.is_serving and os.environ[context.client.api_key_var]
        first = task.data.prompt or "Begin."
        body = {"model": context.model, "messages": [{"role": "user", "content": first}],
                **vars(context.sampling), "stream": False}  # fmt: skip
        said = await asyncio.to_thread(_ask, context.client.base_url, body)
        is_right = float(task.data.answer == said.get("text"))
        trace = SimpleNamespace(
            agent=SimpleNamespace(name="agent"),
            errors=[],
            stop_condition="max_turns" if self.agent.max_turns == 1 else "agent_completed",
            reward=is_right,
            rewards={"right": SimpleNamespace(score=is_right), "skipped": None},
            metrics={"letters": float(len(said.get("text", "")))},
        )
        errors = [SimpleNamespace(type="ProviderError", message=said["error"])] if "error" in said else []
        return SimpleNamespace(ok=not errors, errors=errors, traces=[trace])


class SingleAgentEnv(Env):
    """One agent and its task, which nobody else opens."""


def default_agent_harness(taskset_id):
    return HarnessConfig()


def _ask(url, body):
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return {"text": json.load(answer)["choices"][0]["message"]["content"]}
    except urllib.error.HTTPError as error:
        return {"error": error.read().decode()}
