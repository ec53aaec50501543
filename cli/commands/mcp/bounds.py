"""Bound what an agent may change: verbs, whose runs, files below a directory, how many runs and hours."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.client.client import Client
from lorad.client.overrides import read_spec
from lorad.errors import NotAllowed
from lorad.records.runs import Run
from lorad.selection import Selection
from lorad.spec.model import Spec
from lorad.spec.text import load_spec
from lorad.states import RunState

VERBS = ("run", "sweep", "fork", "resume", "pause", "stop", "kill", "edit", "tag", "note")
CODE = "code"  # allows what _CODE_KEYS are, and paths anywhere
TAG = "mcp"  # on each run that an agent started
_CODE_KEYS = {"python", "url", "key_file", "admin_key_file", "engine_args", "loggers", "notify", "pass_env"}
_TEXTS = {"system", "prompt", "prompt_format", "pattern", "stop"}  # keys whose values are no paths
_PARTS = re.compile(r"[.\[\]{}]+")  # between the parts of a key
_FILE = (".yaml", ".yml")


class OutOfBounds(NotAllowed):
    """A refusal by the bounds of `lorad mcp`, and not by the daemon."""


class AgentBounds(Struct, frozen=True):
    """What an agent may do.

    allowed: words of VERBS, and perhaps CODE.
    base: the directory below which the files of specs lie.
    most_runs: how many runs of agents may be unfinished at a time.
    device_hours: how many hours of devices runs of agents may use from `since` on; None for any number.
    any_run: whether verbs may be about runs that no agent started.
    """

    allowed: frozenset[str] = frozenset()
    base: Path = Path("/")
    most_runs: int = 8
    device_hours: float | None = None
    any_run: bool = False
    since: float = msgspec.field(default_factory=time.time)

    def spec_text(self, spec: str) -> str:
        """Return the text of a spec, which is given as such or by the name of its file below `base`.

        Raises OutOfBounds and SpecError.
        """
        if "\n" in spec or not spec.endswith(_FILE):
            return spec
        if CODE not in self.allowed:
            self._refuse_outside("spec", spec)
        return read_spec(str(self.base / Path(spec).expanduser()))[0]

    def spec_within(self, text: str, overrides: Sequence[str] = ()) -> Spec:
        """Read a spec, whose paths begin at `base`. Raises OutOfBounds and SpecError."""
        spec = load_spec(text, overrides=overrides)
        if spec.resources.priority > 0:
            raise OutOfBounds("resources.priority is above 0", hint="Runs of agents do not go before others.")
        if CODE not in self.allowed:
            usual = dict(_leaves("", msgspec.to_builtins(Spec())))
            for key, value in _leaves("", msgspec.to_builtins(spec)):
                parts = {*_PARTS.split(key)}
                is_code = parts & _CODE_KEYS or key.endswith(".env[]")
                if is_code and value and value != usual.get(key):
                    hint = "The user allows it by `--allow code`."
                    raise OutOfBounds(f"{key.rstrip('[]{}')} may run code or reach out", hint=hint)
                if isinstance(value, str) and not parts & _TEXTS:
                    self._refuse_outside(key, value)
        return spec

    def _refuse_outside(self, key: str, value: str) -> None:
        """Raise OutOfBounds for a value that, where it is a path, leads out of `base`."""
        for path in {value, value.partition(":")[0]}:
            try:
                place = (self.base / Path(path).expanduser()).resolve()
            except (OSError, ValueError, RuntimeError):  # no path at all
                continue
            if not place.is_relative_to(self.base):
                hint = f"Files lie below {self.base}, or the user allows others by `--allow code`."
                raise OutOfBounds(f"{key} leads out of {self.base}: {path[:200]}", hint=hint)

    def refuse_foreign(self, client: Client, name: str) -> Run:
        """Return a run that verbs may be about. Raises OutOfBounds for any other, and NotFound."""
        run = client.show(name)
        if not self.any_run and (TAG not in run.tags or run.owner != client.status().caller.user):
            hint = f"Verbs are for runs that an agent of this user started (tag {TAG})."
            raise OutOfBounds(f"{name} is not a run of yours", hint=hint)
        return run

    def refuse_more(self, client: Client, count: int = 1) -> None:
        """Raise OutOfBounds where `count` more runs are too many, or the device-hours are used up."""
        runs = client.select(Selection(tag=[TAG], owner=["me"]))
        unfinished = [run.name for run in runs if run.state != RunState.ENDED]
        if len(unfinished) + count > self.most_runs:
            hint = "Wait for them, or stop some. The user may start `lorad mcp` with a larger --most-runs."
            message = f"{len(unfinished)} runs are unfinished and at most {self.most_runs} may be"
            raise OutOfBounds(message, hint=hint)
        if self.device_hours is not None:
            names = {run.name for run in runs}
            lines = client.bill("run", user=client.status().caller.user, since=self.since).rows
            hours = sum(line.held for line in lines if line.key in names) / 3600
            if hours >= self.device_hours:
                hint = "The user may start `lorad mcp` anew with more --device-hours."
                raise OutOfBounds(f"{hours:.2f} of {self.device_hours:g} device-hours are used", hint=hint)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:  # a spec as plain data
    """Yield what stands at each dotted key; of a list each value, at KEY[]; names in mappings, too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{key}{{}}", name
            yield from _leaves(f"{key}.{name}" if key else name, inner)
        if not value:
            yield key, value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(f"{key}[]", inner)
    else:
        yield key, value
