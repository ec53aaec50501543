"""The commands of `lorad backends`: list servers and Megatron, install one, name one, remove one."""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from lorad.backends import install as installation
from lorad.backends.installed import TRIED, installed_version, installed_versions
from lorad.backends.recipes import KINDS, PREFIX, recipe_of
from lorad.box.config import config_of
from lorad.box.config_edit import name_backend
from lorad.box.paths import Home, default_home, refuse_open
from lorad.cli import output
from lorad.cli.doctor.engines import engine_checks, trainer_checks
from lorad.cli.options import AsJson, Yes
from lorad.errors import Conflict, LoradError
from lorad.files import expanded, remove_tree
from lorad.servers.table import SERVERS

app = typer.Typer(add_completion=False)
_BRIDGE = "megatron-bridge"
_TRIED = {"megatron": TRIED["megatron"][_BRIDGE]} | {kind: server.tried for kind, server in SERVERS.items()}
_Kind = Annotated[
    Literal["sglang", "vllm", "megatron"], typer.Argument(metavar="KIND", help="sglang, vllm or megatron.")
]
_Prefix = Annotated[Path, typer.Option(help="The directory that the environments are in.")]


@app.callback(invoke_without_command=True)
def backends(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List SGLang, vLLM and Megatron, and where config.yaml says that they are installed.

    A version is verified where lorad was tried with exactly this one.
    """
    if ctx.invoked_subcommand is not None:
        return
    named = config_of(Home(default_home())).backends
    rows = []
    cells = []
    for kind in KINDS:
        python = named[kind].python if kind in named else None
        version = ""
        with contextlib.suppress(LoradError):
            version = _version(kind, python) if python else ""
        verified = version.partition("+")[0] == _TRIED[kind]
        rows.append({"kind": kind, "version": version, "verified": verified, "python": str(python or "")})
        state = f"{version} (verified)" if verified else version or "not installed there" if python else "-"
        cells.append((kind, state, str(python or f"`lorad backends install {kind}` installs it")))
    output.table_or_json(rows, ("backend", "version", "python"), cells, empty="", as_json=as_json)


def _version(kind: str, python: Path) -> str:
    """Return the version of a backend beside an interpreter. Raises SpecError where it is not installed."""
    return installed_version(kind, python) if kind in SERVERS else installed_versions(kind, python)[_BRIDGE]


@app.command()
def install(
    kind: _Kind,
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--cuda", help="For CPUs, or for GPUs of NVIDIA.", show_default="what is here"),
    ] = None,
    prefix: _Prefix = Path(PREFIX),
    python: Annotated[
        str | None, typer.Option(help="The interpreter that the environment is made of.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Try it out when it is installed.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Install a server or Megatron in an environment of its own, name it in config.yaml, and try it out.

    Versions are those that lorad was tried with. What is installed already stays, and what was broken off
    begins anew. uv installs where this machine has it, pip otherwise.
    """
    home = Home(default_home())
    recipe = recipe_of(kind, "" if cpu is None else "cpu" if cpu else "cu")
    place = expanded(prefix).absolute()
    path = place / recipe.name / "bin/python"
    name_backend(home.config, kind, path, recipe.env, dry_run=True)  # refused before anything is fetched
    steps = installation.plan(recipe, place, python)
    answer = {"kind": kind, "version": recipe.version, "device": recipe.device, "python": str(path)}
    if steps:
        output.note(f"{kind} {recipe.version} takes {recipe.gigabytes:.1f} GB in {path.parents[1]}")
    if dry_run and as_json:
        output.print_json(answer | {"steps": list(steps.values())})
    elif dry_run:
        print(*steps.values(), f"lorad backends use {kind} {path}", sep="\n")
    if dry_run:
        return
    if steps and not (yes or as_json):
        typer.confirm("Install it?", abort=True, err=True)
    installation.install(recipe, place, steps)
    is_changed = name_backend(home.config, kind, path, recipe.env)
    checks = []
    if probe:
        for check in engine_checks(home, kind, start=True) if kind in SERVERS else trainer_checks(home, kind):
            checks.append(check)
            output.note(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<14} {check.detail}")
    text = f"{home.config} names {path} for {kind}. Pools that start now take it."
    more = {"installed": bool(steps), "config_changed": is_changed, "checks": checks}
    output.note_or_json(answer | more, text, as_json=as_json)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@app.command()
def use(
    kind: _Kind,
    python: Annotated[Path, typer.Argument(metavar="PYTHON", help="The interpreter beside which it is.")],
    as_json: AsJson = False,
) -> None:
    """Name an interpreter beside which a backend is installed, in config.yaml."""
    home = Home(default_home())
    path = expanded(python).absolute()
    version = _version(kind, path)
    is_own = (path.parent.parent / installation.READY).exists()  # made by lorad, which knows what a CPU lacks
    is_changed = name_backend(home.config, kind, path, recipe_of(kind).env if is_own else {})
    answer = {"kind": kind, "version": version, "python": str(path), "config_changed": is_changed}
    text = f"{home.config} names {path} for {kind}. Pools that start now take it."
    output.note_or_json(answer, text, as_json=as_json)


@app.command()
def remove(kind: _Kind, prefix: _Prefix = Path(PREFIX), yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete the environments of a backend that lorad made and config.yaml does not name."""
    import psutil

    home = Home(default_home())
    named = config_of(home).backends.get(kind)
    place = expanded(prefix).absolute()
    venvs = [path for path in place.glob(f"{kind}-*") if re.fullmatch(r"\w+-[0-9a-f]{12}", path.name)]
    used = named.python.parent.parent.resolve() if named is not None and named.python is not None else None
    unused = [venv for venv in venvs if venv.resolve() != used]
    if not unused:
        raise Conflict(
            f"{place} has no environment of {kind}"
            + (f" but {venvs[0].name}, which {home.config} names" if venvs else ""),
            hint="Another is in use after `lorad backends use`, and none once its lines are taken out of "
            "config.yaml. --prefix names another directory.",
        )
    refuse_open(place)
    for process in psutil.process_iter(["cmdline"]):
        for venv in unused:
            if any(word.startswith(f"{venv}/") for word in process.info["cmdline"] or ()):
                raise Conflict(f"process {process.pid} runs from {venv}", hint="`lorad pools` lists pools.")
    names = ", ".join(map(str, unused))
    if not (yes or as_json):
        typer.confirm(f"Delete {names}?", abort=True, err=True)
    with installation.alone(place):
        for venv in unused:
            (venv / installation.READY).unlink(missing_ok=True)  # from here on it is half of one
            remove_tree(venv)
    answer = {"kind": kind, "deleted": [str(venv) for venv in unused]}
    output.note_or_json(answer, f"Deleted: {names}.", as_json=as_json)
