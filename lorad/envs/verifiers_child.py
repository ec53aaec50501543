"""Play an environment of the package `verifiers` in a process of its own: `main(LIFELINE)`.

JSON lines: an EnvironmentSetup, answered by Described; then Plays as in `program_child.py`. There are two
ways to write an environment: a module with `load_environment` (verifiers 0.1 to 0.3), and a package that
exports a taskset, which a harness plays (from 0.4 on, `verifiers.v1`).

It runs in the interpreter that has the environment, so that the standard library is all that it imports until
it is told which one.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lorad.children.user_code import as_reward, describe, limit_memory, open_lines, send_json
from lorad.envs.program_child import METRIC, MOST_METRICS, serve_episodes
from lorad.errors import LoradError

_KEY = "LORAD_VERIFIERS_KEY"  # clients want a variable that holds a key, whatever it is
_ENDLESS = 4096  # rows of a taskset that does not end
_EMPTY = "EmptyModelResponseError"
_REMOTE = ("prime", "modal", "e2b")  # runtimes
_OTHER_DIALECTS = ("claude_code", "codex")  # harnesses that speak no chat
_ARGS = "See env.args."


def main(lifeline: int) -> None:
    setup, requests, replies = open_lines(lifeline)
    try:
        limit_memory(setup.memory)
        os.environ[_KEY] = "none"
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = _load(setup)
        answer = {"versions": environment.versions, "has_tools": environment.has_tools}
        if setup.lists_rows:
            environment.check()
            send_json(replies, answer | {"rows": [*environment.rows()]})
            return
    except BaseException as error:
        hint = getattr(error, "hint", "") or f"`{sys.executable}` has it: see what its own `vf-eval` says."
        send_json(replies, {"error": describe(error, setup), "hint": hint})
        return

    async def live() -> None:
        async with environment.serving():
            send_json(replies, answer)
            await serve_episodes(setup, environment.play, requests, replies)

    asyncio.run(live())


def _load(setup: Any) -> "_Classic | _Taskset":
    """Import verifiers and the environment. Raises LoradError for what is missing or does not fit."""
    name = setup.function.replace("-", "_")
    if importlib.util.find_spec("verifiers") is None:
        raise LoradError(
            f"{sys.executable} has no package verifiers",
            hint="Install the environment there, or name the interpreter that has it: env.python.",
        )
    verifiers = importlib.import_module("verifiers")
    module = _import(setup, name)
    is_classic = hasattr(module, "load_environment")
    if is_classic and hasattr(verifiers, "load_environment"):
        return _Classic(setup, verifiers, module)
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", ())]
    if not any(kind.__name__ == "Taskset" for each in exported for kind in getattr(each, "__mro__", ())):
        if is_classic:
            raise _of_old(setup.file)
        raise LoradError(
            f"the module {module.__name__} has neither load_environment nor a taskset in __all__",
            hint="Is it an environment of verifiers? Its id is that of `vf-eval`.",
        )
    if hasattr(verifiers, "load_environment"):
        raise _of_new(setup.file)
    return _Taskset(setup, module)


def _import(setup: Any, name: str) -> ModuleType:
    """Import the module of an environment, or the taskset that comes with verifiers."""
    verifiers = importlib.import_module("verifiers")
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(f"verifiers.v1.tasksets.{name.lower()}"):
            name = f"verifiers.v1.tasksets.{name.lower()}"
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        missing = getattr(error, "name", "") or ""
        if missing == name:
            install = f"`prime env install {setup.file.partition(':')[2]}`, or pip"
            raise LoradError(
                f"{sys.executable} has no module {name}",
                hint=f"Install the environment there ({install}), or name the interpreter that has it: "
                "env.python.",
            ) from None
        if missing.startswith("verifiers.v1"):
            raise _of_new(setup.file) from error
        spec = importlib.util.find_spec(name)
        text = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        if "load_environment" in text and not hasattr(verifiers, "load_environment"):
            raise _of_old(setup.file) from error
        if isinstance(error, ModuleNotFoundError):
            hint = f"Install it there: `{sys.executable} -m pip install {missing.replace('_', '-')}`."
            raise LoradError(f"{setup.file} needs the module {missing}", hint=hint) from error
        raise


def _of_old(name: str) -> LoradError:
    return LoradError(
        f"{name} is written for verifiers 0.1 to 0.3, and {sys.executable} has {_version('verifiers')}",
        hint=f"`{sys.executable} -m pip install 'verifiers<0.4'` installs one that plays it.",
    )


def _of_new(name: str) -> LoradError:
    return LoradError(
        f"{name} is written for verifiers 0.4, and {sys.executable} has {_version('verifiers')}",
        hint=f"`{sys.executable} -m pip install 'verifiers>=0.4'` installs one that plays it.",
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _versions(module: ModuleType) -> dict[str, str]:
    """Return the versions of verifiers and of the package that the environment is of."""
    top = module.__name__.partition(".")[0]
    packages = importlib.metadata.packages_distributions().get(top, [])
    return {name: _version(name) for name in sorted({"verifiers", *packages})}


class _Classic:
    """An environment that a module's `load_environment` made.

    Attributes:
        versions: See `Described`.
        has_tools: See `Described`.
    """

    def __init__(self, setup: Any, verifiers: ModuleType, module: ModuleType) -> None:
        self._name = setup.file
        try:
            inspect.signature(module.load_environment).bind(**setup.args)
        except TypeError as error:
            names = ", ".join(inspect.signature(module.load_environment).parameters) or "none"
            raise LoradError(f"load_environment: {error} (env.args)", hint=f"It takes: {names}.") from None
        self._env = verifiers.load_environment(setup.function, **setup.args)
        self._all = [self._env, *(getattr(self._env, "envs", None) or [])]  # a group has several
        self.versions = _versions(module)
        self.has_tools = any(getattr(env, "tool_defs", None) for env in self._all)
        self._lowered = False
        for env in self._all:
            own = getattr(env, "max_turns", setup.turns)
            if own <= 0 or own > setup.turns:
                env.max_turns = setup.turns
                self._lowered = True
        self._of_training: Sequence[Any] = ()
        self._of_evals: Sequence[Any] = ()
        self._open_rows()

    def check(self) -> None:
        """Raise LoradError for what cannot be played."""
        for env in self._all:
            if getattr(env, "requires_group_rollouts", False):
                raise LoradError(
                    f"{self._name} has rewards of a whole group, and an episode is scored by itself",
                    hint="Choose an environment whose rewards are of one episode each.",
                )
            if getattr(env, "message_type", "chat") == "completion":
                raise LoradError(
                    f"{self._name} asks for completions of plain text (message_type), and episodes are chats",
                    hint="Choose an environment of message_type chat.",
                )
            is_remote = any(kind.__name__ == "SandboxEnv" for kind in type(env).__mro__)
            if is_remote and not os.environ.get("PRIME_API_KEY"):
                raise LoradError(
                    f"{self._name} runs tools in sandboxes of Prime's cloud, and has no PRIME_API_KEY",
                    hint="Name it in env.pass_env, or choose an environment without sandboxes.",
                )

    def _open_rows(self) -> None:
        env = self._env
        if getattr(env, "dataset_source", None) is None and getattr(env, "dataset", None) is None:
            raise LoradError(
                f"{self._name} has a dataset for evaluations, and none to train on",
                hint=f"Do its arguments name one? {_ARGS}",
            )
        self._of_training = env.get_dataset()
        if getattr(env, "eval_dataset_source", None) or getattr(env, "eval_dataset", None) is not None:
            self._of_evals = env.get_eval_dataset()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of each `OwnRow`."""
        for is_held_out, dataset in ((False, self._of_training), (True, self._of_evals)):
            for index, row in enumerate(dataset):
                answer = row.get("answer")
                said = answer if isinstance(answer, str) else json.dumps(answer, default=str)
                yield {
                    "index": index,
                    "is_held_out": is_held_out,
                    "prompt": _plain(row["prompt"]),
                    "answer": "" if answer is None else said,
                }

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        yield

    async def play(self, base_url: str, task: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        """Play an episode; return the fields of `Played`. Raises what the environment does."""
        row = (self._of_evals if task["is_held_out"] else self._of_training)[task["index"]]
        _refuse_other(_plain(row["prompt"]), task)
        types = importlib.import_module("verifiers.types")
        config = types.ClientConfig(
            client_type="openai_chat_completions", api_key_var=_KEY, api_base_url=base_url, max_retries=0
        )
        client = importlib.import_module("verifiers.clients").resolve_client(config)
        asked = {name: value for name, value in sampling.items() if name != "model"}
        try:
            out = await self._env.run_rollout({**row}, client, sampling["model"], asked)
        finally:
            await client.close()
        error = out.get("error")  # an episode that broke off has a reward as well
        if error and _EMPTY in str(error.get("error_chain_str", error)):
            return {"reward": 0.0}
        if error:
            raise LoradError(str(error.get("error_chain_repr", error)))
        is_limited = self._lowered and out.get("stop_condition") == "max_turns_reached"
        metrics = _metrics(out.get("metrics") or {})
        return {"reward": as_reward(out["reward"]), "metrics": metrics, "is_limited": is_limited}


class _Taskset:
    """A taskset, and the harness that plays it.

    Attributes:
        versions: See `Described`.
        has_tools: See `Described`.
    """

    def __init__(self, setup: Any, module: ModuleType) -> None:
        self._name = setup.file
        self._v1 = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        block = _block(setup, loaders)
        try:
            config = loaders.resolve_env_config(block)
        except ValueError as error:
            hint = "They are what verifiers writes as its block `env`, such as `{taskset: {split: train}}`."
            raise LoradError(f"env.args: {error}", hint=hint) from None
        agents = {name: one for name, one in config if hasattr(one, "max_turns") and hasattr(one, "runtime")}
        self._seats = [name for name, one in agents.items() if one.client is None]
        self._agents = agents
        self._lowered = False
        for agent in agents.values():
            if agent.max_turns is None or agent.max_turns > setup.turns:
                agent.max_turns = setup.turns
                self._lowered = True
        self._loaders = loaders
        self._config = config
        self._check_early()
        self._env = loaders.load_environment(config)
        taskset = self._env.taskset
        most = _ENDLESS if taskset.INFINITE else None
        self._tasks = [*itertools.islice(iter(taskset), most)]
        self.versions = _versions(module)
        self.has_tools = bool(taskset.toolsets(taskset.config)) or any(
            type(task).toolsets(task.config) for task in self._tasks[:1]
        )

    def _check_early(self) -> None:
        """Raise LoradError for what verifiers would begin to do where the environment is made."""
        if len(self._seats) != 1:
            seats = ", ".join(self._agents)
            raise LoradError(
                f"{self._name} has {len(self._seats)} agents that would be trained together ({seats})",
                hint="Name a client of their own for all but one: "
                "`env.args: {judge: {client: {base_url: …, api_key_var: …}}}`.",
            )
        for seat, agent in self._agents.items():
            harness = agent.harness or self._loaders.default_agent_harness(self._config.taskset.id)
            kind = self._loaders.harness_class(harness.id)
            place = agent.runtime.type
            box = "runtime: {type: docker}"
            in_docker = f"Write `env.args: {{{seat}: {{{box}}}}}` (or apptainer)."
            if place in _REMOTE:
                raise LoradError(
                    f"the agent {seat} runs in the cloud ({place}), which cannot reach the model here",
                    hint=in_docker,
                )
            if harness.id.replace("-", "_") in _OTHER_DIALECTS:
                raise LoradError(
                    f"the harness {harness.id} speaks another form than OpenAI's chat",
                    hint=f"Name another, such as bash in a container: `{{harness: {{id: bash}}, {box}}}`.",
                )
            if place == "subprocess" and kind.EXECUTES_CODE:
                raise LoradError(
                    f"the harness {harness.id} executes what the model writes, and would do so as you",
                    hint=in_docker,
                )
            is_script = kind.__module__.startswith("verifiers.")
            if place == "subprocess" and is_script and shutil.which("uv") is None:
                raise LoradError(
                    f"the harness {harness.id} is a script that `uv` runs, and there is none",
                    hint=f"`{sys.executable} -m pip install uv` installs it.",
                )

    def check(self) -> None:
        """Raise LoradError for what cannot be played."""
        seat = self._seats[0]
        for task in self._tasks[:1]:
            if self._agents[seat].runtime.type == "subprocess" and type(task).NEEDS_CONTAINER:
                raise LoradError(
                    f"{self._name} needs a container",
                    hint=f"Write `env.args: {{{seat}: {{runtime: {{type: docker}}}}}}` (or apptainer).",
                )
            if task.data.prompt is None:
                raise LoradError(
                    f"the tasks of {self._name} have no prompt: somebody else opens the conversation",
                    hint="Choose a taskset whose tasks have one.",
                )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of each `OwnRow`."""
        for index, task in enumerate(self._tasks):
            answer = getattr(task.data, "answer", "")
            said = answer if isinstance(answer, str) else json.dumps(answer, default=str)
            yield {"index": index, "is_held_out": False, "prompt": _prompt(task), "answer": said}

    def serving(self) -> Any:
        """Hold what all episodes share."""
        return self._env.serving()

    async def play(self, base_url: str, task: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        """Play an episode; return the fields of `Played`. Raises what the environment does."""
        own = self._tasks[task["index"]]
        _refuse_other(_prompt(own), task)
        asked = {name: value for name, value in sampling.items() if name != "model"}
        context = self._v1.ModelContext(
            model=sampling["model"],
            client=self._v1.EvalClientConfig(base_url=base_url, api_key_var=_KEY),
            sampling=self._v1.SamplingConfig(**asked),
        )
        episode = await self._env.run_episode(own, context)
        traces = [trace for trace in episode.traces if trace.agent.name == self._seats[0]]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise LoradError(said or "the episode has no result")
        if len(traces) != 1:
            raise LoradError(f"the agent {self._seats[0]} played {len(traces)} times, not once")
        trace = traces[0]
        rewards = {f"reward/{name}": one.score for name, one in trace.rewards.items() if one is not None}
        is_limited = self._lowered and trace.stop_condition == "max_turns"
        metrics = _metrics({**rewards, **trace.metrics})
        return {"reward": as_reward(trace.reward), "metrics": metrics, "is_limited": is_limited}


def _block(setup: Any, loaders: Any) -> dict[str, Any]:
    """Return the block `env` of verifiers. What neither the spec nor the environment says is not as it is by
    default: the runtime is this machine instead of a cloud, and the harness one that executes nothing.
    """
    block: dict[str, Any] = json.loads(json.dumps(setup.args))
    block["taskset"] = {**block.get("taskset", {}), "id": setup.function}
    kind = loaders.env_config_type(setup.function, block.get("id", ""))
    for name, field in kind.model_fields.items():
        default = field.default
        if not (hasattr(default, "max_turns") and hasattr(default, "runtime")):
            continue
        agent = block[name] = {**block.get(name, {})}
        settled = {*agent, *default.model_fields_set}
        if "runtime" not in settled:
            agent["runtime"] = {"type": "subprocess"}
        if "harness" not in settled and loaders.default_harness_id(setup.function) == "bash":
            agent["harness"] = {"id": "null"}
    return block


def _prompt(task: Any) -> Any:
    """Return the prompt of a task with its system prompt, as text or messages."""
    prompt = _plain(task.data.prompt)
    if task.data.system_prompt is None:
        return prompt
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": task.data.system_prompt}, *said]


def _plain(prompt: Any) -> Any:
    """Return a prompt as text, or as messages without keys that say nothing."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    messages: Iterable[Any] = prompt
    plain = [one.model_dump() if hasattr(one, "model_dump") else {**one} for one in messages]
    return [{key: value for key, value in one.items() if value is not None} for one in plain]


def _refuse_other(prompt: Any, task: dict[str, Any]) -> None:
    """Raise LoradError where a row is not the one that was listed."""
    if prompt != task["prompt"]:
        raise LoradError(
            f"row {task['index']} has another prompt than when it was listed: the environment makes or "
            "shuffles its rows by chance; give it a seed (env.args)"
        )


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return what can be shown of metrics: finite numbers, by names of letters, digits and _./-"""
    shown = dict[str, float]()
    for name, value in values.items():
        plain = "".join(letter if METRIC.fullmatch(f"m{letter}") else "_" for letter in str(name))[:64]
        with contextlib.suppress(ValueError):
            shown[plain or "_"] = as_reward(value)
    return dict(itertools.islice(shown.items(), MOST_METRICS))


if __name__ == "__main__":
    main(int(sys.argv[1]))
