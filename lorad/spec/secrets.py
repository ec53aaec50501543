"""Refuse secrets in specs, which are stored, shown to all who may see the run, and copied into forks."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lorad.errors import SpecError

_ADVICE = (
    "Put it into a file that only you can read, and name that: rollout.key_file for servers of your own, "
    "`secrets: {VARIABLE: file}` in config.yaml (in a daemon that several users share: the file "
    "~/.config/lorad/secrets/VARIABLE) for anything that reads its environment."
)
# Keys by their last words; `eos_token`, `max_new_tokens` and `key_file` are none.
_KEYS = re.compile(
    r"(^|_)(passw(or)?d|passphrase|secret|secret_key|private_key|api_?key|access_key|credentials?|"
    r"(api|auth|access|hf|hub|bearer|session|refresh|wandb|github|gitlab|secret)_?token)$|^(token|auth|authorization)$"
)
_VALUES = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|"
    r"xox[abprs]-[\w-]{10,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|[a-z][a-z0-9+.-]{0,20}://[^\s/:@]{1,100}:[^\s/@]{1,200}@"
    r")|(?<=[\w-]{10})\.eyJ[\w-]{10,}\.[\w-]|(?i:bearer\s+[\w.~+/-]{20,})"
)
# The middle of a JWT is looked for: a search from its beginning would read on from each "eyJ".


def refuse_secrets(data: Any, where: Mapping[str, str], source: str) -> None:
    """Raise SpecError for a secret, without repeating it; `where` maps dotted keys to `source:line`."""
    seen = set[str]()  # aliases repeat what is long
    for path, value in _leaves(data, ""):
        kind = _why(path, value, is_read=isinstance(value, str) and value not in seen)
        if isinstance(value, str):
            seen.add(value)
        if kind:
            raise SpecError(
                f"{kind}, and specs are stored and shown",
                key=path,
                where=where.get(path, source),
                hint=_ADVICE,
            )


def refuse_secret_text(text: str, source: str) -> None:
    """Refuse a secret anywhere in the text, comments included. Raises SpecError with the line."""
    if secret := _VALUES.search(text):
        line = text.count("\n", 0, secret.start()) + 1
        raise SpecError(
            f"{source}:{line}: this looks like a secret, and specs are stored and shown", hint=_ADVICE
        )


def hidden(data: Any, path: str = "") -> Any:
    """Return plain data with `(hidden)` for what `refuse_secrets` refuses today and an older lorad took."""
    if isinstance(data, dict):
        return {key: hidden(inner, f"{path}.{key}" if path else str(key)) for key, inner in data.items()}
    if isinstance(data, list | tuple):
        return [hidden(inner, path) for inner in data]
    return "(hidden)" if _why(path, data, is_read=isinstance(data, str)) else data


def _why(path: str, value: Any, *, is_read: bool) -> str:
    """Say why the value of a dotted key is a secret; "" for any other. A repeated text is not read again."""
    name = re.sub(r"[^a-z0-9]+", "_", path.rpartition(".")[2].lower())
    if is_read and _VALUES.search(value):
        return "it looks like a secret"
    says_something = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return "its name says that it is a secret" if says_something and _KEYS.search(name) else ""


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf; a list's items have the key of the list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield path, value
