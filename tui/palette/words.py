"""The words of a typed line: a verb, arguments, and options as commands have them."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lorad.errors import SpecError


@dataclass(frozen=True)
class Given:
    """What was typed behind a verb. flags: the values of each option."""

    arguments: Sequence[str] = ()
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def flag(self, name: str) -> str:
        """Return the last value of an option, "" where it was not given."""
        return self.flags.get(name, [""])[-1]

    @property
    def names(self) -> list[str]:
        return [word for word in self.arguments if "=" not in word]

    @property
    def overrides(self) -> list[str]:
        """Return the words that are key=value."""
        return [word for word in self.arguments if "=" in word]


def split(line: str) -> list[str]:
    """Split a line as a shell does; `lorad` before it is not needed. Raises SpecError for an open quote."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise SpecError(
            "a quote is not closed", hint=f"Close it, or put a backslash before it ({error})."
        ) from None
    return without_lorad(words)


def without_lorad(words: list[str]) -> list[str]:
    return words[1:] if words[:1] == ["lorad"] else words


def given(verb: str, words: Sequence[str], flags: Collection[str]) -> Given:
    """Tell options from arguments. Raises SpecError for an unknown option, or one without a value."""
    arguments: list[str] = []
    options: dict[str, list[str]] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or len(word) == 2:
            arguments.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in flags:
            hint = f"It has {', '.join(sorted(flags))}." if flags else "It has none."
            raise SpecError(f"{verb} has no option {name}", hint=hint)
        if not equals and not left:
            raise SpecError(f"{name} needs a value", hint=f"Type it behind {name}, after a space.")
        options.setdefault(name, []).append(value if equals else left.pop(0))
    return Given(arguments, options)
