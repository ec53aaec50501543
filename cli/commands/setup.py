"""lorad init and completion: a spec to start from, and the script with which a shell completes."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lorad.cli.output import note
from lorad.errors import Conflict, SpecError
from lorad.spec.templates import SMALL, TEMPLATES


def init(
    file: Annotated[Path, typer.Argument(help="Where to.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="The base model.", show_default=SMALL.model)] = None,
    data: Annotated[str | None, typer.Option(help="The training data.", show_default=SMALL.data)] = None,
    template: Annotated[str, typer.Option(help=f"One of: {', '.join(TEMPLATES)}.")] = SMALL.name,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a small spec; every key that it leaves out has a default."""
    if template not in TEMPLATES:
        known = "; ".join(f"{one.name}: {one.says}" for one in TEMPLATES.values())
        raise SpecError(f"there is no template {template}", hint=f"There are {known}.")
    if file.exists() and not force:
        raise Conflict(f"{file} exists", hint="Choose another name, or --force.")
    file.write_text(TEMPLATES[template].filled(str(file), model=model, data=data))
    note(f"Wrote {file}. Start it with `lorad run {file}`.")


class _Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


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
_SCRIPTS = {_Shell.BASH: _BASH, _Shell.ZSH: _ZSH, _Shell.FISH: _FISH}


def completion(shell: Annotated[_Shell, typer.Argument(show_default=False)]) -> None:
    """Print it: `source <(lorad completion bash)` in ~/.bashrc, and so for zsh;
    `lorad completion fish | source`.
    """
    print(_SCRIPTS[shell].strip())
