"""lorad completion SHELL: a script to source."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# Kinds of candidates: see lorad/cli/complete.py.
BASH = r"""
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
ZSH = r"""
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
FISH = r"""
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
SCRIPTS = {Shell.BASH: BASH, Shell.ZSH: ZSH, Shell.FISH: FISH}


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(show_default=False)]) -> None:
    """Print it: `source <(lorad completion bash)` in ~/.bashrc, and so for zsh;
    `lorad completion fish | source`.
    """
    print(SCRIPTS[shell].strip())
