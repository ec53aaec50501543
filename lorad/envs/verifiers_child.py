"""Plays an environment of the package `verifiers` in a process of its own: `main(LIFELINE)`.

JSON lines: an EnvironmentSetup, answered by Described; then Plays as in `program_child.py`. There are two
ways to write an environment: a module with `load_environment` (verifiers 0.1 to 0.3), and a package that
exports a taskset, which a harness plays (from 0.4 on, `verifiers.v1`). It runs in the environment's own
interpreter, so that it imports the standard library alone until it knows which one that is.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from lorad.children.user_code import as_reward, describe, limit_memory, open_lines, send_json
from lorad.envs.program_child import METRIC, MOST_METRICS, hint_of, serve_episodes
from lorad.errors import LoradError

_KEY = "LORAD_VERIFIERS_KEY"  # clients want a variable that holds a key, whatever it is
_ENDLESS = 4096  # rows of a taskset that does not end
_CLOUDS = ("prime", "modal", "e2b")  # runtimes
_PYTHON = sys.executable
_ANOTHER = "Choose another environment."
_CONTAINER = "Write `env.args: {{{}: {{runtime: {{type: docker}}}}}}` (or apptainer)."
_CLIENTS = "Give all but one a client: `env.args: {judge: {client: {base_url: …, api_key_var: …}}}`."


def main(lifeline: int) -> None:
    setup, requests, replies = open_lines(lifeline)
    try:
        limit_memory(setup.memory)
        os.environ[_KEY] = "none"
        os.environ["PATH"] = os.pathsep.join([str(Path(_PYTHON).parent), os.environ.get("PATH", "")])
        environment = _load(setup)
        packages = packages_distributions().get(setup.function.replace("-", "_"), [])
        versions = {name: version(name) for name in sorted({"verifiers", *packages})}
        answer = {"versions": versions, "has_tools": environment.has_tools}
        if setup.lists_rows:
            send_json(replies, answer | {"rows": [*environment.rows()]})
            return
    except BaseException as error:
        _send_error(replies, error, setup)
        return

    async def live() -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(environment.serving())
            except Exception as error:
                _send_error(replies, error, setup)
                return
            send_json(replies, answer)
            await serve_episodes(setup, environment.play, requests, replies)

    asyncio.run(live())


def _send_error(replies: BinaryIO, error: BaseException, setup: Any) -> None:
    """Say why there is no environment, and what to do."""
    hint = hint_of(error) or f"`{_PYTHON}` has it: see what its own `vf-eval` says."
    send_json(replies, {"error": describe(error, setup), "hint": hint})


def _load(setup: Any) -> "_Classic | _Taskset":
    """Import verifiers and the environment, which may be a taskset that comes with verifiers, and make it.

    Raises LoradError for one that is missing or written for another version, and whatever its import raises.
    """
    name = setup.function.replace("-", "_")
    is_old = hasattr(importlib.import_module("verifiers"), "load_environment")
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(f"verifiers.v1.tasksets.{name.lower()}"):
            name = f"verifiers.v1.tasksets.{name.lower()}"
    try:
        module = importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        missing = getattr(error, "name", "") or ""
        if missing == name:
            install = f"Install it there (`prime env install {setup.file.partition(':')[2]}`, or pip)"
            hint = f"{install}, or name the interpreter that has it: env.python."
            raise LoradError(f"{_PYTHON} has no module {name}", hint=hint) from None
        spec = importlib.util.find_spec(name)
        text = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        if missing.startswith("verifiers.v1") or ("load_environment" in text and not is_old):
            raise _written_for_another(setup, is_old) from error
        raise
    exported = [getattr(module, each, None) for each in getattr(module, "__all__", ())]
    is_taskset = any(kind.__name__ == "Taskset" for each in exported for kind in getattr(each, "__mro__", ()))
    is_classic = hasattr(module, "load_environment")
    if not (is_taskset or is_classic):
        problem = f"the module {name} has neither load_environment nor a taskset in __all__"
        raise LoradError(problem, hint="Is it an environment of verifiers? Its id is that of `vf-eval`.")
    if not (is_classic if is_old else is_taskset):
        raise _written_for_another(setup, is_old)
    return _Classic(setup, module) if is_old else _Taskset(setup)


def _written_for_another(setup: Any, is_old: bool) -> LoradError:
    """Make the error for an environment of the other way to write one."""
    versions, remedy = ("0.4", "verifiers>=0.4") if is_old else ("0.1 to 0.3", "verifiers<0.4")
    return LoradError(
        f"{setup.file} is written for verifiers {versions}, and {_PYTHON} has {version('verifiers')}",
        hint=f"`{_PYTHON} -m pip install '{remedy}'` installs one that plays it.",
    )


def _refuse(name: str, *checks: tuple[bool, str, str]) -> None:
    """Raise LoradError for the first check that fails. A check is (whether it fails, the problem, a hint)."""
    for is_wrong, problem, hint in checks:
        if is_wrong:
            raise LoradError(f"{name} {problem}", hint=hint)


class _Classic:
    """An environment that a module's `load_environment` made."""

    serving = contextlib.nullcontext  # a context with the resources that all episodes share

    def __init__(self, setup: Any, module: ModuleType) -> None:
        parameters = inspect.signature(module.load_environment)
        try:
            parameters.bind(**setup.args)
        except TypeError as error:
            hint = f"It takes: {', '.join(parameters.parameters) or 'none'}."
            raise LoradError(f"load_environment: {error} (env.args)", hint=hint) from None
        env = importlib.import_module("verifiers").load_environment(setup.function, **setup.args)
        members = [env, *(getattr(env, "envs", None) or [])]  # a group has several
        kinds = {kind.__name__ for member in members for kind in type(member).__mro__}
        has_groups = any(getattr(member, "requires_group_rollouts", False) for member in members)
        is_plain = any(getattr(member, "message_type", "chat") == "completion" for member in members)
        needs_key = bool(kinds & {"SandboxEnv", "SandboxMixin"}) and not os.environ.get("PRIME_API_KEY")
        _refuse(
            setup.file,
            (has_groups, "has rewards of a whole group, and an episode is scored by itself", _ANOTHER),
            (is_plain, "asks for completions of plain text (message_type), and episodes are chats", _ANOTHER),
            (needs_key, "runs tools in Prime's cloud, and has no PRIME_API_KEY", "Name it in env.pass_env."),
            (not _has(env, "dataset"), "has no dataset to train on", "Does env.args have one to name?"),
        )
        self._env = env
        self._is_lowered = False
        for member in members:
            own = getattr(member, "max_turns", setup.turns)
            if own <= 0 or own > setup.turns:
                member.max_turns = setup.turns
                self._is_lowered = True
        self.has_tools = any(getattr(member, "tool_defs", None) for member in members)
        self._of_training: Sequence[Any] = env.get_dataset()
        self._of_evals: Sequence[Any] = env.get_eval_dataset() if _has(env, "eval_dataset") else ()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of each `OwnRow`."""
        for is_held_out, dataset in ((False, self._of_training), (True, self._of_evals)):
            for index, row in enumerate(dataset):
                yield _row(index, is_held_out, _plain(row["prompt"]), row.get("answer"))

    async def play(self, base_url: str, task: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        """Play an episode; return the fields of `Played`. Raises what the environment does."""
        row = (self._of_evals if task["is_held_out"] else self._of_training)[task["index"]]
        _refuse_another(_plain(row["prompt"]), task)
        types = importlib.import_module("verifiers.types")
        config = types.ClientConfig(
            client_type="openai_chat_completions", api_key_var=_KEY, api_base_url=base_url, max_retries=0
        )
        client = importlib.import_module("verifiers.clients").resolve_client(config)
        settings = {name: value for name, value in sampling.items() if name != "model"}
        try:
            state = await self._env.run_rollout({**row}, client, sampling["model"], settings)
        finally:
            await client.close()
        error = state.get("error") or {}  # such an episode has a reward as well, of what there was of it
        is_empty = "EmptyModelResponseError" in str(error.get("error_chain_str", error))
        if error and not is_empty:
            raise LoradError(str(error.get("error_chain_repr", error)))
        return {
            "reward": 0.0 if is_empty else as_reward(state["reward"]),
            "metrics": _metrics(state.get("metrics") or {}),
            "is_limited": self._is_lowered and state.get("stop_condition") == "max_turns_reached",
        }


class _Taskset:
    """A taskset, and the harness that plays it."""

    def __init__(self, setup: Any) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        v1 = importlib.import_module("verifiers.v1")
        try:
            config = loaders.resolve_env_config(_block(setup, loaders))
        except ValueError as error:
            hint = "They are what verifiers writes as its block `env`, such as `{taskset: {split: train}}`."
            raise LoradError(f"env.args: {error}", hint=hint) from None
        agents = {name: agent for name, agent in config if _is_agent(agent)}
        trained = [name for name, agent in agents.items() if agent.client is None]
        seats = f"has {len(trained)} agents that would be trained together ({', '.join(agents)})"
        _refuse(setup.file, (len(trained) != 1, seats, _CLIENTS))
        self._is_lowered = False
        for seat, agent in agents.items():
            harness = agent.harness or v1.default_agent_harness(config.taskset.id)
            _refuse_unsafe(seat, agent.runtime.type, harness.id, loaders.harness_class(harness.id))
            if agent.max_turns is None or agent.max_turns > setup.turns:
                agent.max_turns = setup.turns
                self._is_lowered = True
        self._env = loaders.load_environment(config)
        self.serving = self._env.serving
        self._seat = trained[0]
        taskset = self._env.taskset
        self._tasks = [*itertools.islice(taskset, _ENDLESS if taskset.INFINITE else None)]
        first = self._tasks[:1]
        is_here = agents[self._seat].runtime.type == "subprocess"
        is_boxed = any(type(task).NEEDS_CONTAINER for task in first)
        is_silent = any(task.data.prompt is None for task in first)
        is_single = any(kind.__name__ == "SingleAgentEnv" for kind in type(self._env).__mro__)
        _refuse(
            setup.file,
            (is_here and is_boxed, "needs a container", _CONTAINER.format(self._seat)),
            (is_silent and is_single, "has tasks without a prompt, and nobody else who begins", _ANOTHER),
        )
        of_tasks = [type(task).toolsets(task.config) for task in first]
        self.has_tools = any([taskset.toolsets(taskset.config), *of_tasks])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of each `OwnRow`."""
        for index, task in enumerate(self._tasks):
            yield _row(index, False, _prompt(task), getattr(task.data, "answer", None))

    async def play(self, base_url: str, task: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        """Play an episode; return the fields of `Played`. Raises what the environment does."""
        own = self._tasks[task["index"]]
        _refuse_another(_prompt(own), task)
        v1 = importlib.import_module("verifiers.v1")
        context = v1.ModelContext(
            model=sampling["model"],
            client=v1.EvalClientConfig(base_url=base_url, api_key_var=_KEY),
            sampling=v1.SamplingConfig(**{k: value for k, value in sampling.items() if k != "model"}),
        )
        episode = await self._env.run_episode(own, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise LoradError(reasons or "the episode has no result")
        traces = [trace for trace in episode.traces if trace.agent.name == self._seat]
        if len(traces) != 1:
            raise LoradError(f"the agent {self._seat} played {len(traces)} times, not once")
        trace = traces[0]
        rewards = {f"reward/{name}": each.score for name, each in trace.rewards.items() if each is not None}
        return {
            "reward": as_reward(trace.reward),
            "metrics": _metrics({**rewards, **trace.metrics}),
            "is_limited": self._is_lowered and trace.stop_condition == "max_turns",
        }


def _has(env: Any, name: str) -> bool:
    """Return whether an environment has this dataset, or makes it when it is asked for it."""
    return getattr(env, f"{name}_source", None) is not None or getattr(env, name, None) is not None


def _is_agent(value: Any) -> bool:
    return hasattr(value, "max_turns") and hasattr(value, "runtime")


def _block(setup: Any, loaders: Any) -> dict[str, Any]:
    """Return verifiers' block `env`, which by default runs on this machine and executes nothing."""
    block: dict[str, Any] = json.loads(json.dumps(setup.args))
    block["taskset"] = {**block.get("taskset", {}), "id": setup.function}
    kind = loaders.env_config_type(setup.function, block.get("id", ""))
    defaults = {name: field.default for name, field in kind.model_fields.items() if _is_agent(field.default)}
    for name, default in defaults.items():
        agent = block[name] = {**block.get(name, {})}
        settled = {*agent, *default.model_fields_set}
        if "runtime" not in settled:
            agent["runtime"] = {"type": "subprocess"}
        if "harness" not in settled and loaders.default_harness_id(setup.function) == "bash":
            agent["harness"] = {"id": "null"}
    return block


def _refuse_unsafe(seat: str, runtime: str, harness: str, kind: Any) -> None:
    """Raise LoradError for an agent that cannot reach the model here, or that endangers this machine."""
    is_here = runtime == "subprocess"
    box = _CONTAINER.format(seat)
    lacks_uv = is_here and kind.__module__.startswith("verifiers.") and shutil.which("uv") is None
    _refuse(
        f"the harness {harness}",
        (runtime in _CLOUDS, f"runs in the cloud ({runtime}), which cannot reach the model here", box),
        (is_here and kind.EXECUTES_CODE, "executes what the model writes, and would do so as you", box),
        (lacks_uv, "is a script that `uv` runs, and there is none", f"`{_PYTHON} -m pip install uv`."),
    )


def _row(index: int, is_held_out: bool, prompt: Any, answer: Any) -> dict[str, Any]:
    """Return the fields of an `OwnRow`."""
    if answer is not None and not isinstance(answer, str):
        answer = json.dumps(answer, default=str)
    return {"index": index, "is_held_out": is_held_out, "prompt": prompt, "answer": answer or ""}


def _prompt(task: Any) -> Any:
    """Return a task's prompt with its system prompt, or the task as JSON if its environment begins."""
    if task.data.prompt is None:
        return task.data.model_dump_json(exclude_none=True)
    prompt = _plain(task.data.prompt)
    if task.data.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": task.data.system_prompt}, *messages]


def _plain(prompt: Any) -> Any:
    """Return a prompt as text, or as messages without empty keys."""
    if isinstance(prompt, str):
        return prompt
    plain = [each.model_dump() if hasattr(each, "model_dump") else {**each} for each in prompt]
    return [{key: value for key, value in each.items() if value is not None} for each in plain]


def _refuse_another(prompt: Any, task: dict[str, Any]) -> None:
    """Raise LoradError where a row is not the one that was listed."""
    if prompt != task["prompt"]:
        raise LoradError(
            f"row {task['index']} has another prompt than when it was listed: the environment makes or "
            "shuffles its rows by chance; give it a seed (env.args)"
        )


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers among metrics, by names of letters, digits and _./-"""
    shown = dict[str, float]()
    for name, value in values.items():
        plain = "".join(letter if METRIC.fullmatch(f"m{letter}") else "_" for letter in str(name))[:64]
        with contextlib.suppress(ValueError):
            shown[plain or "_"] = as_reward(value)
    return dict(itertools.islice(shown.items(), MOST_METRICS))


if __name__ == "__main__":
    main(int(sys.argv[1]))
