"""Make answers that an agent can read without harm: what others wrote is cleaned, cut and fenced.

A model under RL writes whatever pays, so samples are adversarial by construction. Whatever is not a short
plain word is taken for the text of others, unless it is a `_Safe`: nothing is forgotten by mistake.
"""

import re
import secrets
import unicodedata
from typing import Any

import msgspec
from msgspec import Struct

MOST = 20_000  # characters of an answer
TEXT = 600  # characters of a text of others
_OWN = 2_000  # characters of a sentence of lorad's
_HIDDEN = 8  # times the characters that are shown: so far is looked for some that can be seen
_WORD = re.compile(r"[\w.@:/+=<>%-]{0,64}", re.ASCII)
_CATEGORIES = {"Cc", "Cf", "Cs", "Co"}  # control, format (bidi, zero width, tags), surrogates, private use
_VARIANTS = re.compile(  # neither, and yet not seen
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2028\u2029\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
_MARK = re.compile(r"<(?=\s*/?\s*untrusted)", re.IGNORECASE)


class _Safe(str):
    """A text that needs no fence: a sentence of lorad's, or a text that has its fence."""

    __slots__ = ()


def cleaned(text: str, most: int) -> str:
    """Return the beginning of a text, at most so many characters, without any that cannot be seen."""
    visible = (
        char
        for char in _VARIANTS.sub("", text[: _HIDDEN * most])
        if char in "\n\t" or unicodedata.category(char) not in _CATEGORIES
    )
    return "".join(visible)[:most]


def own(text: object) -> _Safe:
    """Mark a sentence of lorad's."""
    return _Safe(cleaned(str(text), _OWN))


def fenced(text: object, most: int = TEXT) -> _Safe:
    """Fence what somebody else wrote. No text knows the number of its mark, so none can end its fence."""
    whole = str(text)
    shown = _MARK.sub("‹", cleaned(whole, most))
    more = f" [{len(whole) - most} more characters]" if len(whole) > most else ""
    nonce = secrets.token_hex(4)
    return _Safe(f"<untrusted {nonce}>{shown}</untrusted {nonce}>{more}")


def plain(value: Any) -> Any:  # whatever JSON has
    """Make JSON of an answer: texts of others are fenced, what is empty is left out, four digits are kept."""
    if isinstance(value, Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        parts = {plain(str(key)): plain(inner) for key, inner in value.items()}
        return {key: inner for key, inner in parts.items() if inner not in (None, "", [], {})}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, str):
        return str(value) if isinstance(value, _Safe) or _WORD.fullmatch(value) else str(fenced(value))
    if isinstance(value, float):
        return round(value) if abs(value) >= 1e5 else float(f"{value:.4g}")
    return value


def bounded(answer: dict[str, Any], advice: str) -> tuple[dict[str, Any], str]:
    """Shorten the largest part of an answer until all of it fits: a list by half, anything else goes.

    advice: what to ask for instead.

    Returns the answer and its JSON.
    """
    answer = {name: plain(part) for name, part in answer.items() if part not in (None, "")}
    lengths = {name: len(value) for name, value in answer.items() if isinstance(value, list)}
    while len(text := msgspec.json.encode(answer).decode()) > MOST:
        sizes = {name: len(msgspec.json.encode(part)) for name, part in answer.items() if name != "cut"}
        name = max(sizes, key=lambda key: sizes[key])
        part = answer.pop(name)
        if isinstance(part, list) and len(part) > 1:
            answer[name] = part[: len(part) // 2]
            answer["cut"] = f"{len(answer[name])} of {lengths[name]} {name} are here. {advice}"
        else:
            answer["cut"] = f"{name} is left out: it has {sizes[name]} characters. {advice}"
    return answer, text
