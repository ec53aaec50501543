"""What is found by its id."""

import importlib

from verifiers import v1

HARNESSES = {"bash": True, "codex": True, "null": False}  # which execute code


def env_config_type(taskset_id, env_id=""):
    return getattr(importlib.import_module(taskset_id.replace("-", "_")), "Config", v1.EnvConfig)


def resolve_env_config(block):
    module = importlib.import_module(block["taskset"]["id"].replace("-", "_"))
    config = env_config_type(block["taskset"]["id"])(block)
    config.taskset_class = getattr(module, module.__all__[0])
    return config


def default_harness_id(taskset_id):
    return "bash"


def harness_class(harness_id):
    return type(
        harness_id, (), {"EXECUTES_CODE": HARNESSES[harness_id], "__module__": "verifiers.v1.harnesses"}
    )


def load_environment(config):
    return (v1.Env if getattr(config.taskset, "opens", False) else v1.SingleAgentEnv)(config)
