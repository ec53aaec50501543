"""The commands of `lorad hosts`: boxes that `lorad --host` knows."""

from typing import Annotated

import msgspec
import typer

from lorad.cli import output
from lorad.cli.options import AsJson
from lorad.client.boxes.entry import BoxEntry, hosts_path
from lorad.client.boxes.hosts import HERE, HostsFile, check_entry, far_home, read_hosts
from lorad.errors import NotFound
from lorad.files import write_whole

app = typer.Typer(add_completion=False)
_Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.callback(invoke_without_command=True)
def hosts(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the boxes whose daemons `lorad --host NAME` asks over ssh."""
    if ctx.invoked_subcommand is not None:
        return
    boxes = read_hosts()
    if as_json:
        output.print_json(boxes)
        return
    rows = [
        (f"{name} *" if name == boxes.default else name, entry.ssh, entry.lorad, entry.home, entry.cwd)
        for name, entry in boxes.hosts.items()
    ]
    empty = "No hosts. `lorad hosts add NAME USER@HOST` adds one."
    output.print_table(("host", "ssh", "lorad", "home", "cwd"), rows, empty=empty)
    if rows:
        output.note(f"Commands are about {boxes.default} unless --host or LORAD_HOST says otherwise.")


@app.command()
def add(
    name: _Name,
    ssh: Annotated[str, typer.Argument(metavar="SSH", help="user@host, or a name of ~/.ssh/config.")],
    lorad: Annotated[str, typer.Option(help="The command there.")] = "lorad",
    home: Annotated[str, typer.Option(help="LORAD_HOME there.")] = "",
    cwd: Annotated[str, typer.Option(help="Where relative paths begin there.")] = "",
    as_json: AsJson = False,
) -> None:
    """Add a box, or replace the one of that name, and look whether lorad answers there."""
    entry = BoxEntry(ssh, lorad, home, cwd)
    check_entry(name, entry)
    boxes = read_hosts()
    _write(HostsFile({**boxes.hosts, name: entry}, boxes.default))
    facts = far_home(name).open(anew=True)
    if as_json:
        output.print_json({"host": name, **msgspec.to_builtins(facts)})
        return
    state = "runs" if facts.running else f"does not run: `lorad --host {name} daemon start` starts it"
    about = f"{name} has lorad {facts.version}, home {facts.home}, user {facts.user}"
    output.note(f"{about}; its daemon {state}.")


@app.command()
def rm(name: _Name, as_json: AsJson = False) -> None:
    """Forget a box, and end ssh's connection to it. Nothing changes there."""
    boxes = read_hosts()
    _refuse_unknown(name, boxes)
    far_home(name).close()
    rest = {key: entry for key, entry in boxes.hosts.items() if key != name}
    _write(HostsFile(rest, HERE if boxes.default == name else boxes.default))
    output.note_or_json({"removed": name}, f"{name} is forgotten.", as_json=as_json)


@app.command()
def use(name: _Name, as_json: AsJson = False) -> None:
    """Make a box the one of all commands that name none; `here` is this machine again."""
    boxes = read_hosts()
    if name != HERE:
        _refuse_unknown(name, boxes)
    _write(HostsFile(boxes.hosts, name))
    output.note_or_json({"default": name}, f"Commands are about {name} from now on.", as_json=as_json)


def _refuse_unknown(name: str, boxes: HostsFile) -> None:
    if name not in boxes.hosts:
        raise NotFound(f"there is no host {name}", hint="`lorad hosts` lists what there is.")


def _write(boxes: HostsFile) -> None:
    import yaml  # slow, and only needed to write

    path = hosts_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, yaml.safe_dump(msgspec.to_builtins(boxes), sort_keys=False).encode())
