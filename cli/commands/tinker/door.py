"""The commands tinker env and tinker keys: what a client needs to use this home as Tinker."""

import contextlib
import http.client
import json
import os
import shlex
import time
from typing import Annotated, Any

import typer

from lorad.box.config import TinkerSettings, config_of
from lorad.box.keys import keep_own_key, keys_file, make_key, own_key, read_keys, revoke_key
from lorad.box.paths import Home, default_home
from lorad.cli import output
from lorad.cli.doctor.logout import own_name
from lorad.cli.options import AsJson
from lorad.client import launch
from lorad.errors import DaemonUnreachable, NotAllowed, SpecError

app = typer.Typer(no_args_is_help=True, help="Let the official tinker client train here.")
keys_app = typer.Typer(help="Keys of the door: make, list, revoke.")
app.add_typer(keys_app, name="keys")

_UP_SECONDS = 30.0  # for the door's first answer
_SHOWN = 12  # digits of a sha256
_CAPABILITIES = "/api/v1/get_server_capabilities"
_KEY = "TINKER_API_KEY"


@app.command()
def env(
    as_json: AsJson = False,
    new: Annotated[bool, typer.Option("--new", help="Make another key, and keep that one.")] = False,
) -> None:
    """Print what a client needs in its environment, once that works: `eval "$(lorad tinker env)"`.

    The key is that of TINKER_API_KEY if the door knows it, else yours from before, else a new one.
    """
    home, settings = _home()
    if settings.port is None:
        raise SpecError(
            f"{home.config} has no tinker.port, so there is no door",
            hint="Add `tinker: {port: 8093, bases: {Qwen/Qwen3-8B: /models/qwen3-8b}}`, then `lorad daemon "
            "stop`; the next command starts it again.",
        )
    launch.connected(home)
    key, answer, origin = _key(home, settings, new=new)
    bases = [model["model_name"] for model in answer.get("supported_models", [])]
    url = f"http://127.0.0.1:{settings.port}"
    variables = {"TINKER_BASE_URL": url, _KEY: key, "TINKER_TELEMETRY": "0"}
    if strange := not_on_the_hub(settings, bases):
        variables |= {"HF_ENDPOINT": url} | ({"HF_TOKEN": key} if home.shared_by is not None else {})
    if as_json:
        output.print_json(variables | {"bases": bases})
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    output.note(f"# {origin} Bases: {', '.join(bases) or 'none; name some in tinker.bases of config.yaml'}.")
    if missing := [name for name in settings.bases if name not in bases]:
        output.note(
            f"# Not served: {', '.join(missing)}; the log under {home.tinker}/attempts says why. A daemon "
            "from before the change of config.yaml has to be started again."
        )
    if strange:
        output.note(
            f"# With HF_ENDPOINT the door gives the tokenizer of {', '.join(strange)}, which the hub cache "
            "here does not have. It gives nothing else of the hub: leave it out where the hub is reached."
        )
    output.note(
        "# A notebook needs the same: set them in os.environ before `import tinker`. From another machine: "
        f"ssh -L {settings.port}:127.0.0.1:{settings.port}."
    )


def _key(home: Home, settings: TinkerSettings, *, new: bool) -> tuple[str, dict[str, Any], str]:
    """Find a key that works, or make one: the key, what the door answers to it, and where it is from."""
    own_keys = [] if new else [("The key of TINKER_API_KEY works.", os.environ.get(_KEY, ""))]
    own_keys += [] if new else [("Your key of before.", own_key(home))]
    for origin, key in own_keys:
        if key and (answer := _answer(settings, key)) is not None:
            return key, answer, origin
    key = make_key(keys_file(home, settings), own_name())
    if (answer := _answer(settings, key)) is None:
        hint = f"See {home.tinker}/attempts for its log."
        raise NotAllowed("the door does not know the key that was just made", hint=hint)
    keep_own_key(home, key)
    return key, answer, "A new key, which the next call prints too; `lorad tinker keys` lists all."


def not_on_the_hub(settings: TinkerSettings, served: list[str]) -> list[str]:
    """List the bases whose tokenizer the hub has not, nor its cache; none where HF_ENDPOINT is elsewhere."""
    if os.environ.get("HF_ENDPOINT") not in (None, "", f"http://127.0.0.1:{settings.port}"):
        return []
    strange = []
    for name, base in settings.bases.items():
        if name in served and base.partition("@")[0] != name:
            from huggingface_hub import try_to_load_from_cache  # slow, and rarely needed

            cached: object = None
            with contextlib.suppress(ValueError):  # no name that a hub has
                cached = try_to_load_from_cache(name, "tokenizer.json")
            strange += [] if isinstance(cached, str) else [name]
    return strange


@keys_app.callback(invoke_without_command=True)
def keys(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the keys by owner; of each, the beginning of its sha256."""
    if ctx.invoked_subcommand is not None:
        return
    home, settings = _home()
    by_owner = read_keys(keys_file(home, settings))
    rows = [(owner, digest) for owner, digests in sorted(by_owner.items()) for digest in digests]
    answer = [{"owner": owner, "sha256": digest} for owner, digest in rows]
    shown = [(owner, digest[:_SHOWN]) for owner, digest in rows]
    empty = "No keys. `lorad tinker keys make` makes one."
    output.table_or_json(answer, ("owner", "sha256"), shown, empty=empty, as_json=as_json)


@keys_app.command()
def make(
    owner: Annotated[str | None, typer.Argument(help="Whose it is.", show_default="you")] = None,
) -> None:
    """Make a key and print it; only its sha256 is kept."""
    home, settings = _home()
    print(make_key(keys_file(home, settings), owner or own_name()))


@keys_app.command()
def revoke(key: Annotated[str, typer.Argument(metavar="SHA256", help="How its sha256 begins.")]) -> None:
    """Forget a key: whoever has it is let in no more."""
    home, settings = _home()
    output.note(f"A key of {revoke_key(keys_file(home, settings), key)} is revoked.")


def _home() -> tuple[Home, TinkerSettings]:
    """Return the home and its settings. Raises NotAllowed in a shared home of another user."""
    home = Home(default_home())
    if home.shared_by is not None and not os.access(home.config, os.R_OK):
        user = own_name()
        raise NotAllowed(
            f"{home.root} is shared: keys of its tinker door are made by who administers it",
            hint=f"Ask them for `lorad tinker keys make {user}` and the port; then set TINKER_API_KEY, "
            "TINKER_BASE_URL=http://127.0.0.1:PORT and TINKER_TELEMETRY=0.",
        )
    return home, config_of(home).tinker


def _answer(settings: TinkerSettings, key: str) -> dict[str, Any] | None:
    """Ask the door what it serves; None where it does not know the key. Raises DaemonUnreachable."""
    deadline = time.monotonic() + _UP_SECONDS
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=_UP_SECONDS)
        try:
            connection.request("GET", _CAPABILITIES, headers={"X-API-Key": key})
            response = connection.getresponse()
            body = response.read()
            if response.status in (401, 403):
                return None
            with contextlib.suppress(ValueError):
                answer = json.loads(body)
                if response.status == http.client.OK and isinstance(answer, dict):
                    return answer
            raise DaemonUnreachable(
                f"port {settings.port} answers {response.status}, {body[:40]!r}, as no door of lorad does",
                hint="Does another program listen there?",
            )
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                raise DaemonUnreachable(
                    f"no door answers on port {settings.port} ({error})",
                    hint="`lorad daemon status` lists troubles; a daemon from before the change of "
                    "config.yaml has to be started again.",
                ) from None
            time.sleep(0.1)
        finally:
            connection.close()
