"""What can follow in a typed line: verbs, then what each of their arguments can be."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from lorad.client.boxes.hosts import ALL
from lorad.client.client import Client
from lorad.client.words import phase, steps_in_words
from lorad.errors import LoradError
from lorad.records.runs import Run
from lorad.selection import STATES
from lorad.tui.palette.plans import without_lorad
from lorad.tui.palette.verbs import SHORT, TABS, VERBS, PaletteVerb
from lorad.tui.watch import LOCAL, names

_SHOWN = 100  # candidates
_RUNS = 500  # that ended
_T = TypeVar("_T")


class Candidate(NamedTuple):
    """A word that can follow; `line` is the whole line with it."""

    line: str
    word: str
    says: str = ""


@dataclass(eq=False)
class Source:
    """Completes lines from answers of the daemon, each asked for once. Not for several threads at once."""

    _client: Client
    _themes: Iterable[str]
    _answers: dict[str, Any] = field(default_factory=dict)

    def candidates(self, line: str) -> list[Candidate]:
        """Return what the last word of a line can be. Nothing where the daemon does not answer."""
        before, space, last = line.rpartition(" ")
        try:
            possible = self._after(without_lorad(before.split()), last)
        except LoradError:
            return []
        fitting = [each for each in possible if last in each[0]]
        fitting.sort(key=lambda each: not each[0].startswith(last))
        candidates = []
        for word, says in dict(fitting[:_SHOWN]).items():
            typed = word if word.endswith("=") else shlex.quote(word)
            candidates.append(Candidate(f"{before}{space}{typed}", word, says))
        return candidates

    def _after(self, words: list[str], last: str) -> Iterable[tuple[str, str]]:
        if not words:
            return [(verb.name, verb.says) for verb in VERBS.values()]
        if (verb := VERBS.get(SHORT.get(words[0], words[0]))) is None:
            return []
        if words[-1] in verb.flags:
            return list(self._of(verb.flags[words[-1]], verb, words, last))
        if last.startswith("-"):
            return [(flag, "") for flag in verb.flags]
        if verb.name == "open" and len(words) > 2:
            return []
        at = len(words) - 1
        kind = verb.takes[min(at, len(verb.takes) - 1)] if verb.takes else ""
        return [each for part in kind.split(" or ") for each in self._of(part, verb, words, last)]

    def _of(self, kind: str, verb: PaletteVerb, words: list[str], last: str) -> Iterable[tuple[str, str]]:
        """Return words and what they mean."""
        match kind:
            case "run":
                fit = [run for run in self._runs() if run.state not in verb.left_out]
                moving = [run for run in fit if run.steps or run.step]
                steps = {run.name: f", step {steps_in_words(run, ' of ')}" for run in moving}
                return [(run.name, phase(run) + steps.get(run.name, "")) for run in fit]
            case "version":
                return self._versions(last)
            case "alias":
                aliases = self._once("aliases", self._client.aliases)
                return [(alias.alias, f"serves {alias.run}@{alias.version}") for alias in aliases]
            case "pool":
                pools = self._once("pools", self._client.pools)
                if verb.name == "open" and words[1:] != ["pool"]:
                    return [("pool", "a pool, by its name")] if len(words) == 1 else []
                return [(pool.pool, f"{pool.state}, {pool.model}") for pool in pools]
            case "device":
                if words[1:] != ["device"]:
                    return [("device", "a device, by its name")] if len(words) == 1 else []
                devices = self._once("devices", self._client.devices)
                return [(device.device, device.name) for device in devices]
            case "tab":
                return [(tab, "") for tab in TABS] if words[1:] not in (["pool"], ["device"]) else []
            case "step":
                kept = self._once(f"steps {words[1]}", lambda: self._client.checkpoints(words[1]))
                return [(str(saved.step), f"@{saved.version}") for saved in reversed(kept)]
            case "key":
                from lorad.spec.errors import choices, leaves
                from lorad.spec.model import Spec

                key, equals, _ = last.partition("=")  # behind which are their values, where these are few
                if not equals:
                    return [(f"{name}=", "") for name in leaves(Spec)]
                return [(f"{key}={choice}", "") for choice in choices(Spec, key)]
        return [(word, "") for word in self._filter_values(kind)]

    def _filter_values(self, kind: str) -> Iterable[str]:
        """Return the values that a filter can have, or names that no daemon knows."""
        match kind:
            case "theme":
                return self._themes
            case "box":
                return [LOCAL, *names()[1:], ALL]
            case "state":
                return STATES
            case "owner":
                return dict.fromkeys(["me", *(run.owner for run in self._runs())])
            case "tag":
                return dict.fromkeys(tag for run in self._runs() for tag in run.tags)
            case "base":
                return dict.fromkeys(run.base for run in self._runs() if run.base)
            case "sweep":
                return [row.sweep for row in self._once("sweeps", self._client.sweeps)]
        return ()

    def _runs(self) -> list[Run]:
        return self._once("runs", lambda: self._client.list(all=True, limit=_RUNS))

    def _versions(self, last: str) -> list[tuple[str, str]]:
        """Return runs until one is typed, then its versions, newest first."""
        name, at, _ = last.partition("@")
        names = [run.name for run in self._runs()]
        if name not in names or (not at and sum(run.startswith(name) for run in names) > 1):
            return [(f"{run}@", "") for run in names]
        candidates = []
        for row in reversed(self._once(f"versions {name}", lambda: self._client.adapters(name))):
            marks = [f"step {row.step}", *(["pinned"] if row.pinned else []), *row.aliases]
            candidates.append((f"{name}@{row.version}", ", ".join(marks)))
        return candidates

    def _once(self, key: str, ask: Callable[[], _T]) -> _T:
        if key not in self._answers:
            self._answers[key] = ask()
        return cast(_T, self._answers[key])
