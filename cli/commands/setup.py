"""The commands init, completion and notify: a first spec, the script of a shell, trials of notifications."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from lorad.box.models import MODELS
from lorad.cli import candidates, output
from lorad.cli.doctor.logout import own_name
from lorad.cli.options import AsJson
from lorad.cli.output import note
from lorad.client.client import Client
from lorad.errors import Conflict, NotAllowed, NotFound, SpecError
from lorad.files import expanded
from lorad.spec.notify import Notify
from lorad.spec.templates import SMALL, TEMPLATES


def init(
    file: Annotated[Path, typer.Argument(help="Where to.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="The base model.", show_default=SMALL.model)] = None,
    data: Annotated[str | None, typer.Option(help="The training data.", show_default=SMALL.data)] = None,
    template: Annotated[str, typer.Option(help=f"One of: {', '.join(TEMPLATES)}.")] = SMALL.name,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a small spec; every key that it leaves out has a default."""
    from lorad.rl.sources import SUFFIXES  # slow

    if template not in TEMPLATES:
        templates = "; ".join(f"{choice.name}: {choice.says}" for choice in TEMPLATES.values())
        raise SpecError(f"there is no template {template}", hint=f"There are {templates}.")
    if file.exists() and not force:
        raise Conflict(f"{file} exists", hint="Choose another name, or --force.")
    file.write_text(TEMPLATES[template].filled(str(file), model=model, data=data))
    note(f"Wrote {file}. Start it with `lorad run {file}`.")
    model = model or ""
    is_path = model.startswith((".", "/", "~")) or model.count("/") != 1
    if model in MODELS and not expanded(model).is_dir():
        note(f"`lorad models get {model}` downloads the model, where it is not there yet.")
    elif model and is_path and not model.startswith("builtin:") and not expanded(model).is_dir():
        note(f"warning: there is no directory {model}; one of the hub is ORG/NAME")
    if Path(data or "").suffix in SUFFIXES and not expanded(data or "").exists():
        note(f"warning: there is no file {data} yet")


# Kinds of candidates: see lorad/cli/complete.py.
_BASH = r"""
_lorad() {
    local kind value
    COMPREPLY=()
    while IFS=$'\t' read -r kind value _; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            part) compopt -o nospace; COMPREPLY+=("$value") ;;
            *) COMPREPLY+=("$value") ;;
        esac
    done < <(_LORAD_COMPLETE=bash "${1/#\~\//$HOME/}" "${COMP_LINE:0:$COMP_POINT}" "$2" 2>/dev/null)
}
complete -o nosort -F _lorad lorad
"""
_ZSH = r"""
#compdef lorad
_lorad() {
    local kind value meaning
    local -a plain parts
    while IFS=$'\t' read -r kind value meaning; do
        case $kind in
            file) _files ;;
            dir) _files -/ ;;
            part) parts+=("$value") ;;
            *) plain+=("${value//:/\\:}${meaning:+:$meaning}") ;;
        esac
    done < <(_LORAD_COMPLETE=zsh "${(Q)words[1]/#\~\//$HOME/}" "${(@Q)words[2,CURRENT]}" 2>/dev/null)
    (( $#plain )) && _describe -V lorad plain
    (( $#parts )) && compadd -S '' -- $parts
    return 0
}
if [[ $funcstack[1] == _lorad ]]; then
    _lorad "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _lorad lorad
fi
"""
_FISH = r"""
function __lorad_complete
    set -l words (commandline -opc) (commandline -ct)
    set words[1] (string replace -r '^~/' "$HOME/" -- $words[1])
    for line in (env _LORAD_COMPLETE=fish $words 2>/dev/null)
        set -l parts (string split \t -- $line)
        switch $parts[1]
            case file
                __fish_complete_path (commandline -ct)
            case dir
                __fish_complete_directories (commandline -ct)
            case '*'
                printf '%s\t%s\n' $parts[2] "$parts[3]"
        end
    end
end
complete -c lorad -f -k -a '(__lorad_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print it: `source <(lorad completion bash)` in ~/.bashrc, and so for zsh;
    `lorad completion fish | source`.
    """
    print(_SCRIPTS[shell].strip())


notify_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Who hears of starts, ends, failures and alarms of runs."
)


@notify_app.callback()
def notify() -> None:
    """Try out who hears of starts, ends, failures and alarms of runs."""


@notify_app.command()
def test(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run, whose receivers get it; without one those of config.yaml.",
            autocompletion=candidates.runs,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a trial to each receiver, once and from here, and say what became of it.

    Exit code 1 where one did not take it.
    """
    from lorad.box.config import config_of
    from lorad.box.paths import Home, default_home
    from lorad.notify.deliver import deliver
    from lorad.notify.outbox import trial
    from lorad.notify.table import Undelivered

    if run is not None:
        receivers, cwd, facts = _of_run(run)
    else:
        home = Home(default_home())
        receivers = config_of(home).notify
        cwd = str(Path.cwd())
        facts = {}
        if not receivers:
            hint = "docs/notify.md shows how, or name a run."
            raise NotFound(f"{home.config} names nobody in notify", hint=hint)
    results = []
    for number, to in enumerate(receivers):
        delivery = trial(run or "", number, to, cwd, facts)
        error = ""
        try:
            asyncio.run(deliver(delivery))
        except Undelivered as undelivered:
            error = str(undelivered)
        results.append({"to": to.title, "id": delivery.message.id, "error": error})
    if as_json:
        output.print_json(results)
    else:
        for result in results:
            output.report(f"{result['to']}: {result['error'] or 'delivered'}")
    if any(result["error"] for result in results):
        raise typer.Exit(1)


def _of_run(name: str) -> tuple[list[Notify], str, dict[str, Any]]:
    """Return the receivers of a run, its working directory and its facts. Raises NotFound and NotAllowed."""
    shown = Client().show(name)
    receivers = msgspec.convert(shown.spec.get("notify") or [], list[Notify])
    if not receivers:
        raise NotFound(f"the spec of {name} names nobody in notify", hint="docs/notify.md shows how.")
    if shown.owner not in ("", str(os.getuid()), own_name()):
        hint = "They can try them out."
        raise NotAllowed(f"{name} is of {shown.owner}, as whom its notifications are sent", hint=hint)
    facts = {key: getattr(shown, key) for key in ("owner", "state", "step", "steps", "attempt", "version")}
    return receivers, shown.cwd or "/", facts
