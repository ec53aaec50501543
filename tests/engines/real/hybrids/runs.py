"""Runs on tiny bases of other families than builtin:tiny's, with fsdp and a real server."""

import json
from pathlib import Path

from tests.engines.real.places import OF_RUNS, python_of
from tests.kit.world import World
from tests.models.bases import write_spoken_base

_SPEC = """
model: {path: BASE}
algorithm: {group_size: 8}
reward: {name: regex, pattern: "[A-M]"}
data: {train: sort, prompts_per_step: 2}
trainer: {backend: fsdp, lr: 2.0e-3, steps: 3}
rollout: {backend: KIND, max_new_tokens: 8}
eval: {every: 0}
checkpoint: {every: 3}
"""


def start(made: World, kind: str, family: str, *overrides: str, **backend: str) -> Path:
    """Start a run called `hybrid`; returns the directory of its base. backend: more of its configuration."""
    base = made.root / family
    if not base.exists():
        write_spoken_base(base, family)
    # SGLang imports the models of builtin:tiny alone where it is told to leave out the others
    env = {name: value for name, value in OF_RUNS[kind].items() if name != "SGLANG_DISABLED_MODEL_ARCHS"}
    made.home.root.mkdir(parents=True, exist_ok=True)
    configured = {"backends": {kind: {"python": python_of(kind), "env": env, **backend}}}
    made.home.config.write_text(json.dumps(configured))  # YAML has JSON in it
    spec = made.spec(_SPEC.replace("BASE", str(base)).replace("KIND", kind))
    made.lorad("run", spec, *overrides, "--name", "hybrid", "--detach")
    return base
