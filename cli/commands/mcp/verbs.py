"""Tools of `lorad mcp` that change something: each is there where the user allowed it, within bounds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lorad.cli.commands.mcp.bounds import TAG, AgentBounds
from lorad.cli.commands.mcp.fence import cleaned
from lorad.cli.commands.mcp.reads import Answer, brief
from lorad.client import launch
from lorad.client.client import Client
from lorad.errors import SpecError
from lorad.records.requests import PointsRequest

_NOTE = 400  # characters


@dataclass
class Verbs:
    """Holds the tools: each word of VERBS is a method."""

    _client: Client
    _bounds: AgentBounds

    def run(self, spec: str, name: str, overrides: Sequence[str] = ()) -> Answer:
        """Queue a run; the call returns at once, `wait` waits.

        spec: YAML, or the name of its .yaml file.
        name: not in use.
        overrides: KEY=VALUE.
        """
        launch.connected(self._client.home)
        text = self._bounds.spec_text(spec)
        tags = self._bounds.spec_within(text, overrides).tags
        self._bounds.refuse_more(self._client)
        run = self._client.run(
            text, source="spec", cwd=str(self._bounds.base), overrides=[*overrides, _tagged(tags)], name=name
        )
        return brief(run)

    def sweep(
        self, spec: str, name: str, points: Sequence[dict[str, Any]], overrides: Sequence[str] = ()
    ) -> Answer:
        """Queue a run for each point, such as {"trainer.lr": 0.001, "seed": 1}; at least one."""
        if not points:
            hint = 'For example [{"trainer.lr": 0.001}, {"trainer.lr": 0.003}].'
            raise SpecError("a sweep has points", hint=hint)
        launch.connected(self._client.home)
        text = self._bounds.spec_text(spec)
        listed = [[f"{key}={json.dumps(value)}" for key, value in point.items()] for point in points]
        tags = [self._bounds.spec_within(text, [*overrides, *point]).tags for point in listed]
        self._bounds.refuse_more(self._client, len(listed))
        started = self._client.sweep(
            text,
            source="spec",
            cwd=str(self._bounds.base),
            overrides=[*overrides, _tagged(tags[0])],
            name=name,
            halving=None,
            points=PointsRequest(listed=listed),
        )
        runs = [{"name": run.name, "values": run.values} for run in started.runs]
        return {"sweep": started.sweep, "runs": runs, "warnings": started.warnings}

    def fork(
        self, version: str, name: str, overrides: Sequence[str] = (), steps: int | None = None
    ) -> Answer:
        """Queue a run that starts from a version (RUN@N, RUN@best) of a run of yours."""
        self._bounds.refuse_foreign(self._client, version.partition("@")[0])
        self._bounds.spec_within("", overrides)
        self._bounds.refuse_more(self._client)
        run = self._client.fork(version, overrides=overrides, name=name, steps=steps, fresh=False)
        return brief(self._client.label(run.name, add=[TAG]))

    def resume(
        self, name: str, step: int | None = None, steps: int | None = None, overrides: Sequence[str] = ()
    ) -> Answer:
        """Continue a run from a checkpoint, by default the newest. steps: how many it makes in all."""
        run = self._bounds.refuse_foreign(self._client, name)
        self._bounds.spec_within("", overrides)
        self._bounds.refuse_more(self._client, int(run.state == "ended"))
        return brief(self._client.resume(name, step=step, steps=steps, overrides=overrides))

    def pause(self, name: str) -> Answer:
        """Interrupt a run after its step, with a checkpoint; `resume` continues it."""
        self._bounds.refuse_foreign(self._client, name)
        return brief(self._client.pause(name))

    def stop(self, name: str) -> Answer:
        """End a run after its step, with a checkpoint; it can be resumed."""
        self._bounds.refuse_foreign(self._client, name)
        return brief(self._client.stop(name))

    def kill(self, name: str) -> Answer:
        """End a run at once; what it did since its last checkpoint is lost. Prefer `stop`."""
        self._bounds.refuse_foreign(self._client, name)
        return brief(self._client.kill(name))

    def edit(self, name: str, overrides: Sequence[str]) -> Answer:
        """Change keys of a queued run: resources and, before its first attempt, trainer.steps."""
        self._bounds.refuse_foreign(self._client, name)
        self._bounds.spec_within("", overrides)
        return brief(self._client.edit(name, overrides))

    def tag(self, name: str, add: Sequence[str] = (), remove: Sequence[str] = ()) -> Answer:
        """Add words to a run, and take some off it."""
        self._bounds.refuse_foreign(self._client, name)
        if TAG in remove:
            raise SpecError(f"the tag {TAG} stays", hint="It says that an agent started the run.")
        return brief(self._client.label(name, add=add, remove=remove))

    def note(self, name: str, text: str) -> Answer:
        """Write a sentence of yours on a run; people see it in `lorad show`. It replaces the one before."""
        self._bounds.refuse_foreign(self._client, name)
        return brief(self._client.label(name, note=cleaned(text, _NOTE)))


def _tagged(tags: list[str]) -> str:
    return f"tags={json.dumps([*dict.fromkeys([*tags, TAG])])}"
