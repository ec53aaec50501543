"""Run lm-eval and inspect-ai as they are, by an interpreter of the user's; they ask through the gateway."""

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from lorad.box.proxies import past_proxies
from lorad.client.client import Client
from lorad.errors import Conflict, LoradError, SpecError
from lorad.evaluation.door import Door, opened
from lorad.protocol.evals import Evaluated, Suite, Wanted

_AT_ONCE = 8  # requests of a suite
_SECONDS = 600.0  # for a pool to start
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # unless the user's environment says otherwise


class _Asked(NamedTuple):
    """What the command of a suite is made of; `model` is run@number, and `directory` has the base."""

    task: str
    model: str
    directory: str
    out: Path
    settings: Mapping[str, Any]


class _Kind(NamedTuple):
    """One suite.

    package: its distribution.
    environment: makes the variables with address and key.
    read: reads the file that it wrote.
    """

    package: str
    command: Callable[[_Asked, Door], Sequence[object]]
    environment: Callable[[Door], dict[str, str]]
    read: Callable[[Path], Evaluated]


def run_suite(request: Wanted, suite: Suite) -> Evaluated:
    """Run a suite. Raises SpecError for an interpreter without it, Conflict without a gateway, LoradError."""
    kind = _KINDS[suite.kind]
    version = _version_of(suite.python, kind.package)
    task = suite.task
    cwd = request.cwd
    if suite.kind == "inspect":  # it takes a file from where it lies
        path = Path(cwd, task)
        if not path.with_name(path.name.partition("@")[0]).is_file():
            hint = "Write inspect:FILE or inspect:FILE@TASK."
            raise SpecError(f"there is no file {path}", key="--suite", hint=hint)
        task = path.name
        cwd = str(path.parent)
    client = Client(timeout=_SECONDS)
    serving = client.serving(request.version)
    socket = client.status().gateway
    name = f"{serving.run}@{serving.version}"
    if socket is None:
        hint = f"`lorad pin {name}` starts one, and keeps the version loaded."
        raise Conflict("no gateway is up", hint=hint)
    with tempfile.TemporaryDirectory(prefix="lorad-suite-") as scratch:
        out = Path(request.cwd, request.out) if request.out else Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        before = set(out.rglob("*.json"))
        asked = _Asked(task, name, serving.model_path, out, request.settings)
        code = asyncio.run(_done(kind, socket, suite, asked, cwd))
        logs = [path for path in out.rglob("*.json") if path not in before]
        if code or not logs:
            hint = "Its words are above."
            raise LoradError(f"{suite.kind} ended with code {code} and no result", hint=hint)
        result = kind.read(max(logs, key=lambda path: path.stat().st_mtime_ns))
    used = {key: value for key, value in request.settings.items() if value is not None}
    return replace(result, version=name, settings=used | {"suite_version": version})


async def _done(kind: _Kind, socket: str, suite: Suite, request: _Asked, cwd: str) -> int:
    """Run the suite to its end, and return its exit code."""
    async with opened(socket) as door:
        process = await asyncio.create_subprocess_exec(
            suite.python,
            *("-m", *map(str, kind.command(request, door))),
            env=_OFFLINE | os.environ | past_proxies(os.environ) | kind.environment(door),
            cwd=cwd,
        )
        return await process.wait()


def _version_of(python: str, package: str) -> str:
    """Ask an interpreter for the version of a distribution. Raises SpecError where it has none."""
    asked = [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise SpecError(f"{python} does not run: {error.strerror}", key="--python") from error
    if done.returncode:
        hint = f"Name the interpreter of an environment with it: python -m venv, pip install {package}."
        raise SpecError(f"{python} has no {package}", key="--python", hint=hint)
    return done.stdout.strip()


def _lm_eval(request: _Asked, door: Door) -> list[object]:
    model = {
        "model": request.model,
        "base_url": f"{door.url}/v1/completions",
        "tokenizer": request.directory,
        "num_concurrent": _AT_ONCE,
    }
    command: list[object] = ["lm_eval", "--model", "local-completions", "--model_args", json.dumps(model)]
    command += ["--tasks", request.task, "--output_path", request.out]
    if request.settings.get("problems"):
        command += ["--limit", request.settings["problems"]]
    sampling: dict[str, Any] = {}
    if request.settings.get("max_new_tokens"):
        sampling["max_gen_toks"] = request.settings["max_new_tokens"]
    if request.settings.get("temperature"):
        sampling |= {"temperature": request.settings["temperature"], "do_sample": True}
    return [*command, "--gen_kwargs", json.dumps(sampling)] if sampling else command


def _read_lm_eval(path: Path) -> Evaluated:
    """Read figures of lm-eval, with the names of several tasks before them; `acc,none` is acc."""
    data = json.loads(path.read_text())
    metrics: dict[str, float] = {}
    for task, figures in data["results"].items():
        for name, value in figures.items():
            if isinstance(value, int | float) and "_stderr" not in name and name != "sample_len":
                short = name.removesuffix(",none")
                metrics[short if len(data["results"]) == 1 else f"{task}/{short}"] = float(value)
    counts = [samples["effective"] for samples in data.get("n-samples", {}).values()]
    return Evaluated(metrics=_with_score(metrics), problems=sum(counts))


def _inspect(request: _Asked, _: Door) -> list[object]:
    command: list[object] = [
        "inspect_ai",
        "eval",
        request.task,
        "--model",
        f"openai-api/lorad/{request.model}",
    ]
    command += ["--log-format", "json", "--log-dir", request.out, "--display", "plain"]
    command += ["--max-connections", _AT_ONCE, "--temperature", request.settings.get("temperature", 0.0)]
    for key, option in (("problems", "--limit"), ("max_new_tokens", "--max-tokens")):
        if request.settings.get(key):
            command += [option, request.settings[key]]
    return command


def _read_inspect(path: Path) -> Evaluated:
    """Read figures of inspect-ai, with the names of several scorers before them. Raises LoradError."""
    data = json.loads(path.read_text())
    if data["status"] != "success":
        why = (data.get("error") or {}).get("message", "its log does not say why")
        raise LoradError(f"inspect ended with {data['status']}: {why}")
    results = data["results"]
    metrics = {
        name if len(results["scores"]) == 1 else f"{score['name']}/{name}": float(metric["value"])
        for score in results["scores"]
        for name, metric in score["metrics"].items()
        if name != "stderr"
    }
    total = results["total_samples"]
    failed = total - results["completed_samples"]
    return Evaluated(metrics=_with_score(metrics), problems=total, failed=failed)


def _with_score(metrics: dict[str, float]) -> dict[str, float]:
    """Name the first figure `score` besides, as lorad's own evaluations do."""
    return {"score": next(iter(metrics.values())), **metrics} if metrics else {}


_KINDS = {
    "lm_eval": _Kind("lm_eval", _lm_eval, lambda door: {"OPENAI_API_KEY": door.key}, _read_lm_eval),
    "inspect": _Kind(
        "inspect_ai",
        _inspect,
        lambda door: {"LORAD_API_KEY": door.key, "LORAD_BASE_URL": f"{door.url}/v1"},
        _read_inspect,
    ),
}
