"""A taskset whose episodes have two agents."""

from types import SimpleNamespace
from typing import ClassVar

import verifiers.v1 as vf
from taskset_toy import ToyTaskset

__all__ = ["ToyTaskset"]


class Config(vf.EnvConfig):
    model_fields: ClassVar = {name: SimpleNamespace(default=vf.AgentConfig()) for name in ("solver", "judge")}
