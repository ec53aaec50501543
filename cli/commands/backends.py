"""The commands of `lorad backends`: what servers and trainers there are here, install one, name one."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lorad.backends import recipes, trainer_install
from lorad.backends.engine_install import installed_version
from lorad.backends.install import (
    READY,
    check_driver,
    check_room,
    find_python,
    install,
    is_ready,
    torch_index,
)
from lorad.backends.probes import last_probes
from lorad.box.config import config_of
from lorad.box.config_edit import change_backend
from lorad.box.paths import Home, default_home, refuse_open
from lorad.children.interpreter import InterpreterFinding
from lorad.cli import output
from lorad.cli.doctor.engines import engine_checks, trainer_checks
from lorad.cli.options import AsJson, Yes
from lorad.errors import Conflict, LoradError, NotAllowed
from lorad.files import expanded, remove_tree
from lorad.servers.table import SERVERS

app = typer.Typer(add_completion=False)
_DEVICES = {"cpu": "CPU", "cu": "GPU", "": "-"}
_Kind = Annotated[
    Literal["sglang", "vllm", "megatron"], typer.Argument(metavar="KIND", help="sglang, vllm or megatron.")
]


@app.callback(invoke_without_command=True)
def backends(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the backends that are installed in environments of their own.

    A version is verified where lorad was tried with exactly this one. The last probe is the last `lorad
    doctor --engine` or `--trainer`, which `install` runs as well.
    """
    if ctx.invoked_subcommand is not None:
        return
    home = Home(default_home())
    named = config_of(home).backends
    probes = last_probes(home)
    rows: list[dict[str, Any]] = []
    for kind in recipes.KINDS:
        python = named[kind].python if kind in named else None
        probe = probes.get(kind)
        if probe is not None and probe.python != str(python):
            probe = None
        version = None if python is None else _version(kind, python)
        about = _stamp(python)
        rows.append(
            {
                "kind": kind,
                "python": None if python is None else str(python),
                "version": version,
                "verified": version is not None and version.partition("+")[0] == _tried(kind),
                "device": about.get("device") or (probe.device if probe else ""),
                "named_by": None if python is None else str(home.config),
                "probe": probe,
            }
        )
    if as_json:
        output.print_json(rows)
        return
    names = ("backend", "version", "device", "python", "named by", "last probe")
    output.print_table(names, [_cells(row) for row in rows], empty="")


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row of the table."""
    if row["python"] is None:
        return row["kind"], "-", "-", f"none: lorad backends install {row['kind']}", "-", "-"
    version = "not installed there"
    if row["version"]:
        version = row["version"] + (" (verified)" if row["verified"] else f" (tried: {_tried(row['kind'])})")
    last = "never"
    if probe := row["probe"]:
        last = f"{f'failed: {probe.failed[0]}' if probe.failed else 'ok'}, {output.age(probe.at)} ago"
    return row["kind"], version, _DEVICES[row["device"]], row["python"], row["named_by"], last


def _tried(kind: str) -> str:
    return SERVERS[kind].tried if kind in SERVERS else trainer_install.TRIED[kind]["megatron-bridge"]


def _version(kind: str, python: Path) -> str | None:
    try:
        return _checked_version(kind, python)
    except LoradError:
        return None


def _checked_version(kind: str, python: Path) -> str:
    """Return the version of a backend beside an interpreter. Raises SpecError where it is not there."""
    if kind in SERVERS:
        return installed_version(kind, python)
    return trainer_install.installed_versions(kind, python)["megatron-bridge"]


def _stamp(python: Path | None) -> dict[str, Any]:
    """Return what lorad wrote of an environment that it made; empty for another."""
    try:
        text = (python or Path("/")).parent.parent.joinpath(READY).read_text()
        return {"device": "cpu"} | json.loads(text or "{}")  # empty: an earlier one, for tests
    except (OSError, ValueError):
        return {}


def _own_config() -> Path:
    """Return the file of this home. Raises NotAllowed for the home of another user."""
    home = Home(default_home())
    if home.shared_by is not None:
        raise NotAllowed(
            f"{home.config} is of user {home.shared_by}, whose daemon this is",
            hint="Its user, or root, names backends.",
        )
    return home.config


@app.command("install")
def install_(
    kind: _Kind,
    cpu: Annotated[bool, typer.Option("--cpu", help="For CPUs, also where there is a GPU.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="For GPUs of NVIDIA.")] = False,
    prefix: Annotated[
        Path, typer.Option(help="Where the environment goes, in a directory of its own.")
    ] = Path(recipes.PREFIX),
    python: Annotated[
        str | None, typer.Option(help="The interpreter that it is made of.", show_default=False)
    ] = None,
    probe: Annotated[bool, typer.Option(help="Try it out when it is installed.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Install a server or Megatron in an environment of its own, name it in config.yaml, and try it out.

    Versions are those that lorad was tried with. What is there already is left as it is, and what was broken
    off is begun anew. uv installs where there is one, pip otherwise.
    """
    if cpu and cuda:
        raise Conflict("--cpu and --cuda exclude each other", hint="Leave one out.")
    config = _own_config()
    recipe = recipes.recipe_of(kind, "cpu" if cpu else "cu" if cuda else "")
    place = expanded(prefix).absolute()
    interpreter = place / recipe.name / "bin/python"
    is_there = is_ready(place / recipe.name)
    change_backend(config, kind, str(interpreter), recipe.env, dry_run=True)  # refused before anything else
    steps = [] if is_there else _planned(recipe, place, python)
    answer = {"kind": kind, "python": str(interpreter), "version": recipe.version, "device": recipe.device}
    if dry_run:
        _show_plan(answer, steps, config, as_json)
        return
    if not (yes or is_there or as_json):
        typer.confirm(f"Install it into {place / recipe.name}?", abort=True, err=True)
    install(recipe, place, output.note, python=python)
    changed = change_backend(config, kind, str(interpreter), recipe.env)
    checks = _probe(kind) if probe else []
    if as_json:
        output.print_json(answer | {"installed": not is_there, "config_changed": changed, "checks": checks})
    else:
        state = "was there" if is_there else "is installed"
        output.report(f"{kind} {recipe.version} {state}: {interpreter}")
        _tell_of_config(config, kind, changed)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _planned(recipe: recipes.Recipe, place: Path, python: str | None) -> list[str]:
    """List the commands that install a backend in `place`, and say what they need."""
    if place.exists():
        refuse_open(place)
    check_driver(recipe)
    base, minor = find_python(recipe, python)
    free = check_room(recipe, place)
    device = "GPUs" if recipe.device == "cu" else "CPUs"
    room = f"{recipe.bytes / 1e9:.1f} GB; {free / 1e9:.0f} GB are free"
    output.note(f"{recipe.kind} {recipe.version} for {device}, on Python 3.{minor}, takes {room}.")
    venv = str(place / recipe.name)
    index = torch_index(recipe)
    return [recipes.in_shell(step) for step in recipe.steps(venv, base, minor, torch_index=index)]


def _show_plan(answer: dict[str, Any], steps: list[str], config: Path, as_json: bool) -> None:
    """Say what `install` would do."""
    if as_json:
        output.print_json(answer | {"steps": steps, "config": str(config)})
        return
    for line in steps or ["# It is installed."]:
        output.report(line)
    output.report(f"# {config}: backends.{answer['kind']}.python is {answer['python']}")


def _tell_of_config(config: Path, kind: str, changed: bool) -> None:
    state = "names it from now on" if changed else "names it already"
    kept = (
        f"; the old one is {config.name}.1"
        if changed and config.with_name(f"{config.name}.1").exists()
        else ""
    )
    output.report(f"{config} {state}, as backends.{kind}.python{kept}. Pools that start now take it.")


def _probe(kind: str) -> list[InterpreterFinding]:
    """Check a backend as `lorad doctor` does, and show what is found on stderr."""
    home = Home(default_home())
    checks = []
    findings = engine_checks(home, kind, start=True) if kind in SERVERS else trainer_checks(home, kind)
    for finding in findings:
        checks.append(finding)
        output.note(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:<14} {finding.detail}")
    return checks


@app.command()
def use(
    kind: _Kind,
    python: Annotated[Path, typer.Argument(metavar="PYTHON", help="The interpreter beside which it is.")],
    as_json: AsJson = False,
) -> None:
    """Name an interpreter beside which a backend is installed, in config.yaml."""
    config = _own_config()
    path = expanded(python).absolute()
    version = _checked_version(kind, path)
    is_for_cpu = _stamp(path).get("device") == "cpu"  # which lorad made, and knows what it lacks
    env = recipes.recipe_of(kind, "cpu").env if is_for_cpu else {}
    changed = change_backend(config, kind, str(path), env)
    if as_json:
        output.print_json({"kind": kind, "python": str(path), "version": version, "config_changed": changed})
        return
    _tell_of_config(config, kind, changed)


@app.command()
def remove(kind: _Kind, yes: Yes = False, as_json: AsJson = False) -> None:
    """Take a backend out of config.yaml, and delete it where lorad installed it."""
    import psutil

    config = _own_config()
    named = config_of(Home(default_home())).backends.get(kind)
    if named is None or named.python is None:
        raise Conflict(
            f"config.yaml names no python for {kind}", hint="`lorad backends` lists what there is."
        )
    venv = named.python.parent.parent
    is_own = (venv / READY).exists() and venv.name.startswith(f"{kind}-")
    if is_own:
        refuse_open(venv.parent)
        for process in psutil.process_iter(["cmdline"]):
            if any(word.startswith(f"{venv}/") for word in process.info["cmdline"] or ()):
                raise Conflict(
                    f"process {process.pid} runs from {venv}", hint="End its pool first: `lorad pools`."
                )
    if not yes and not as_json:
        what = f"Delete {venv}" if is_own else f"Take {kind} out of {config}; {venv} stays"
        typer.confirm(f"{what}?", abort=True, err=True)
    change_backend(config, kind, None)
    if is_own:
        (venv / READY).unlink()  # from here on it is half of one
        remove_tree(venv)
    if as_json:
        output.print_json({"kind": kind, "deleted": str(venv) if is_own else None})
        return
    output.report(f"{config} names no {kind} now; {venv} {'is deleted' if is_own else 'was left as it is'}.")
