"""The rows of the table of actions: what a key does, and verbs, which ask the daemon for something."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

from msgspec import Struct
from textual.binding import Binding

from lorad.client.client import Client

Values = Mapping[str, str]  # what was typed, by field; "" where nothing was


@dataclass(frozen=True)
class Field:
    """A text that an action asks for.

    Attributes:
        flag: The command's flag for it; "" where it is an argument.
        check: Says what is wrong with a value, or "".
        takes: What the line completes it with, in words of `candidates.Source`.
        word: What the command shows where nothing was typed.
    """

    key: str
    label: str
    flag: str = ""
    says: str = ""
    check: Callable[[str], str] = lambda value: ""
    takes: str = ""
    word: str = ""


@dataclass(frozen=True)
class Action:
    """A row of the table.

    Attributes:
        id: What help and `tui.keymap` call it.
        keys: The keys for it, as Textual names them; "" where only the line has it.
        label: What footer and help call it.
        does: The action of Textual.
        says: What it does, for help and palette.
        footer: Whether the footer shows it, where there is room at all (kept) or to spare (spare).
        display: How the footer writes the key, where Textual would write something else.
        first: It comes before what is focused gets the key, so that what is typed next, however soon, is not
            lost to that.
    """

    id: str
    keys: str
    label: str
    does: str = ""
    says: str = ""
    footer: Literal["", "shown", "kept", "spare"] = ""
    display: str | None = None
    first: bool = False

    @property
    def meaning(self) -> str:
        """Describe it for the help."""
        return f"{self.label}: {self.says[0].lower()}{self.says[1:]}" if self.says else self.label

    @property
    def binding(self) -> Binding:
        return Binding(
            self.keys,
            self.does,
            self.label,
            id=self.id,
            show=bool(self.footer),
            key_display=self.display,
            priority=self.first,
        )


@dataclass(frozen=True, kw_only=True)
class VerbAction(Action):
    """A row that asks the daemon for something; the line takes the same words as the command.

    Attributes:
        name: What keys, palette and line call it.
        on: The kind of thing that it acts on: `run`, `version`, `alias` or `pool`.
        cli: What stands behind `lorad` in a shell, with the thing and fields by their names in braces; other
            fields follow.
        usage: What follows it in the line; "" where the line does not have it.
        fields: What is asked for first.
        lost: Says what will be lost, for the user to agree to; "" if nothing is, then nothing is asked. It
            runs on a thread.
        done: Says what was done.
        many: The same input can hold for several things at once.
        of_others: Whoever may see a thing may do it.
        over_when: The states of a run in which nothing is left to do.
        left_out: Further states of runs that a glob or a filter leaves out.
    """

    name: str
    on: str
    cli: str
    request: Callable[[Client, str, Values], Struct]
    done: Callable[[str, Any], str]
    usage: str = ""
    fields: tuple[Field, ...] = ()
    lost: Callable[[Client, str, Values], str] | None = None
    many: bool = False
    of_others: bool = False
    over_when: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    @property
    def places(self) -> list[str]:
        """Name the thing and the fields in the order in which they are typed, but those of flags."""
        inside = [name for _, name, _, _ in Formatter().parse(self.cli) if name]
        return inside + [field.key for field in self.fields if not field.flag and field.key not in inside]

    def command(self, target: str, values: Values | None = None) -> str:
        """Return the line to type in a shell, quoted where it needs that."""
        typed = {field.key: (values or {}).get(field.key, "").strip() for field in self.fields}
        words = {self.on: target} | {field.key: typed[field.key] or field.word for field in self.fields}
        inside = self.cli.format_map({name: shlex.quote(word) for name, word in words.items()})
        parts = ["lorad", inside]
        for field in self.fields:
            if not (value := typed[field.key]) or f"{{{field.key}}}" in self.cli:
                continue
            parts += [field.flag, shlex.quote(value)] if field.flag else [shlex.join(shlex.split(value))]
        return " ".join(parts)
