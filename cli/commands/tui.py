"""lorad tui: the dashboard, here or in a browser."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from lorad.box.config import Config
from lorad.cli.launch import connected
from lorad.cli.settings import config_of
from lorad.client.client import Client
from lorad.errors import SpecError

app = typer.Typer(add_completion=False)

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?2026h\x1b[H\x1b[2J"  # the other screen of the terminal, empty, until DRAWN
DRAWN = "\x1b[?2026l"
LEAVE = "\x1b[?25h\x1b[?1049l"


@app.command()
def tui(
    readonly: Annotated[bool, typer.Option("--readonly", help="Only look: every action is refused.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="In a browser: prints a URL for you alone.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Port on 127.0.0.1 for --serve; default: a free one.", min=0, max=65535)
    ] = None,
) -> None:
    """Watch and control runs in the terminal, or (--serve) in a browser."""
    if port is not None and not serve:
        raise typer.BadParameter("it needs --serve", param_hint="--port")
    if not serve and "TEXTUAL_DRIVER" not in os.environ and not (sys.stdin.isatty() and sys.stdout.isatty()):
        hint = "`lorad top` prints the same as text, and `lorad tui --serve` shows it in a browser."
        raise SpecError("lorad tui needs a terminal, and its input or output is not one", hint=hint)
    client = connected()
    if serve:
        from lorad.tui.web.server import serve as serve_browsers

        serve_browsers(client.home.root, port=port or 0, readonly=readonly)
        return
    config = config_of(client.home)
    os.environ.setdefault("TEXTUAL_FPS", "500")  # only what changed is drawn, and a key waits for two frames
    gc.disable()  # until the first screen stands: a tenth of the time until then
    with glance(client, config) if sys.stdout.isatty() and sys.stderr.isatty() else contextlib.nullcontext():
        from lorad.tui.app import LoradApp

        screens = LoradApp(client, readonly=readonly, config=config)
    screens.run()


@contextlib.contextmanager
def glance(client: Client, config: Config) -> Iterator[None]:
    """Print what `lorad top` shows while the screens are imported that replace it.

    The import takes longer than everything else, on a machine with busy cores a second and more.
    """
    from lorad.cli.commands import top

    found, told = top.look(client, config.alarms)
    try:
        print(ENTER, end="")
        top.show(found, told, watch=False)
        print(DRAWN, end="", flush=True)
        yield
    except BaseException:
        print(DRAWN, LEAVE, sep="", end="", flush=True)
        raise
