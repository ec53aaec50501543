"""Tools of `lorad mcp` that change nothing. A tool's docstring is what the agent reads about it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import NODEFAULT, to_builtins

from lorad.alarms import alarms
from lorad.api.connection import DaemonConnection
from lorad.api.waiting import wait as wait_for
from lorad.box.config import config_of
from lorad.cli.commands.mcp.bounds import TAG, AgentBounds
from lorad.cli.commands.mcp.fence import TEXT, fenced, own
from lorad.cli.commands.specs.keys import keys_like
from lorad.cli.compared import compared
from lorad.cli.many import GOOD
from lorad.cli.sweeps import ranked
from lorad.client.choice import Choice, ordered_by
from lorad.client.client import Client
from lorad.client.conditions import condition
from lorad.client.log_lines import has_words, words
from lorad.client.words import why as waits_for
from lorad.errors import NotFound, NotReached, RunFailed, TimedOut
from lorad.records.requests import RunRequest
from lorad.records.runs import Run
from lorad.selection import Selection
from lorad.text import size
from lorad.why.table import explain

Answer = dict[str, Any]  # JSON before it is cleaned, see `fence.plain`
_PATIENCE = 50.0  # seconds: clients break calls off after 60
_LOG_BYTES = 1 << 20  # in which `grep` looks
_LOG_CHARACTERS = 12_000
_STEPS = 10_000  # of a run at most, among which points are chosen
_BRIEF = (  # what an agent needs of each run
    *("name", "state", "reason", "step", "steps", "reward", "eval_first", "eval_last", "nll_last"),
    *("version", "owner", "priority", "sweep", "pool"),
)
_FIGURES = ("step", "version", "reward", "advantage", "rewards", "problem")  # of a sample
_EVENTS = 1000  # that are looked through


def brief(run: Run) -> Answer:
    """Return what an agent needs of each run."""
    answer = {key: getattr(run, key) for key in _BRIEF}
    answer["waits"] = own(waits_for(run)) if run.state == "queued" else ""
    others = " ".join(tag for tag in run.tags if tag != TAG)
    answer["tags"] = fenced(others) if others else ""
    answer["detail"] = fenced(run.detail) if run.reason not in GOOD else ""
    return answer | ({"values": run.values} if run.values else {})


@dataclass
class Reads:
    """Holds the tools: each method is one."""

    _client: Client
    _bounds: AgentBounds

    def box(self) -> Answer:
        """Version, troubles, runs by state, devices and who has them, pools, and alarms that are on."""
        status = self._client.status()
        devices = self._client.devices()
        pools = self._client.pools()
        limits = config_of(self._client.home).alarms
        raised = alarms(self._client.list(), limits, pools=pools, devices=devices, status=status)
        return {
            "version": status.version,
            "you": status.caller.user,
            "shared": status.shared,
            "runs": status.runs,
            "troubles": status.troubles,
            "disk_free": own(size(status.disk.free if status.disk else None)),
            "devices": [
                {
                    "device": device.device,
                    "memory": own(f"{size(device.memory_used)} of {size(device.memory_total)}"),
                    "utilization": device.utilization,
                    "pool": device.pool,
                    "held_by": device.lease and device.lease.user,
                    "reserved_by": device.reservation and device.reservation.user,
                    "quiet_until": device.quiet_until,
                }
                for device in devices
            ],
            "pools": [
                {"pool": p.pool, "state": p.state, "model": p.model, "runs": [r.run for r in p.runs]}
                for p in pools
            ],
            "alarms": [{"level": a.level, "kind": a.kind, "on": a.subject, "says": a.says} for a in raised],
        }

    def runs(
        self,
        names: Sequence[str] = (),
        state: Sequence[str] = (),
        owner: Sequence[str] = (),
        sweep: Sequence[str] = (),
        tag: Sequence[str] = (),
        keys: Sequence[str] = (),
        sort: Sequence[str] = (),
        limit: int = 20,
    ) -> Answer:
        """List runs, newest first. Filters are globs; state also takes ends (failed), owner also `me`.

        keys: dotted names of the spec (trainer.lr) or metrics, shown as `values`.
        sort: columns or keys, the largest first with `-` before one.
        """
        selection = Selection([*names], [*state], [*owner], [*sweep], [*tag])
        chosen = self._client.select(selection, keys=keys, sort=sort, limit=max(1, limit))
        return {"runs": [brief(run) for run in chosen]}

    def show(self, name: str) -> Answer:
        """All about a run: the spec where it differs from the defaults, attempts, best version, alarms."""
        from lorad.tui.spec_lines import differing, flat

        run = self._client.show(name)
        raised = alarms([run], config_of(self._client.home).alarms)
        return brief(run) | {
            "spec": differing(flat(run.spec)),
            "doing": run.doing,
            "best": run.best,
            "sets": run.sets,
            "results": run.results[-5:],
            "attempts": run.attempts[-5:],
            "expected": run.expected,
            "warnings": run.warnings,
            "alarms": [{"level": alarm.level, "says": alarm.says} for alarm in raised],
            "note": fenced(run.note) if run.note else "",
            "origin": run.origin,
            "directory": run.directory,
        }

    def why(self, name: str) -> Answer:
        """Why a run does not learn: findings, the likeliest first, each with what to try next."""
        answer = explain(self._client, name)
        findings = [to_builtins(finding) | {"next": own(finding.next)} for finding in answer.findings]
        return {"says": answer.says, "looked": own(answer.looked), "findings": findings}

    def curves(self, names: list[str], metrics: Sequence[str] = (), points: int = 20) -> Answer:
        """Figures over steps, of several runs at equal steps: evenly chosen ones, extremes, first and last.

        metrics: what steps (reward, loss, kl, entropy, truncated, ...) or evaluations (eval, nll) have.
        Default: reward, loss, eval.
        """
        shown = metrics or ["reward", "loss", "eval"]
        figures: dict[tuple[str, str], dict[int, Any]] = {(n, m): {} for n in names[:8] for m in shown[:8]}
        for name in names[:8]:
            every = max(1, -(-self._client.show(name).step // _STEPS))
            rows: list[tuple[int, Any]] = [
                (step.step, step.metrics) for step in self._client.steps(name, every=every)
            ]
            rows += [(evaluation.step, evaluation.figures) for evaluation in self._client.evals(name)]
            for step, values in rows:
                for metric in shown[:8]:
                    if values.get(metric) is not None:
                        figures[name, metric][step] = values[metric]
        figures = {column: values for column, values in figures.items() if values}
        steps = sorted({step for values in figures.values() for step in values})
        last = max(2, min(points, 200, len(steps))) - 1
        chosen = {steps[round(place * (len(steps) - 1) / last)] for place in range(last + 1) if steps}
        for values in figures.values():
            chosen |= {end(values, key=lambda step: values[step]) for end in (min, max)}
        columns = [f"{metric} {name}" for name, metric in figures]
        table = [[step, *(values.get(step) for values in figures.values())] for step in sorted(chosen)]
        return {"columns": [own(column) for column in ("step", *columns)], "rows": table}

    def compare(self, first: str, second: str) -> Answer:
        """What two runs have otherwise: keys of the spec, digests of data and files, versions of packages."""
        runs = [self._client.show(name) for name in (first, second)]
        difference = compared(runs, [])
        return {
            "runs": [brief(run) for run in runs],
            **{part: getattr(difference, part) for part in ("spec", "changed", "inputs", "software")},
        }

    def sweeps(self, name: str = "") -> Answer:
        """All sweeps, or one: its runs, the best first, each with its values and scores."""
        sweeps = self._client.sweeps(name or None)
        if not name:
            return {"sweeps": [{"sweep": s.sweep, "owner": s.owner, "runs": len(s.runs)} for s in sweeps]}
        if not sweeps:
            raise NotFound(f"no sweep is called {name[:64]}")
        scores = ("eval_best", "reward_mean", "loss_mean")
        rows = [brief(run) | {key: getattr(run, key) for key in scores} for run in ranked(sweeps[0])]
        about = ("name", "state", "reason", "step", "steps", "eval_last", "nll_last")
        shown = (*about, *scores, "values", "detail")
        runs = [{key: row[key] for key in shown if key in row} for row in rows]
        return {"grid": sweeps[0].grid, "halving": sweeps[0].halving, "runs": runs}

    def samples(
        self,
        run: str,
        step: int | None = None,
        where: str = "",
        sort: str = "drawn",
        reverse: bool = False,
        eval_set: str = "",
        limit: int = 4,
        characters: int = TEXT,
    ) -> Answer:
        """What the model wrote at a step (default: the last), as untrusted text.

        where: `reward>0.5 length<=100 end:length turns=2 failed truncated !end:done word`, all must hold.
        sort: drawn, reward, advantage, length or turns; the largest first.
        eval_set: `main` or of eval.sets.
        """
        choice = Choice(where, ordered_by(sort), reverse)
        most = max(1, min(characters, 4000))
        rows = self._client.samples(
            run, step=step, limit=max(1, min(limit, 20)), eval=eval_set or None, choice=choice, brief=True
        )
        shown = []
        for row in rows:
            turns = [(f"turn {n}", turn.text, turn.observation) for n, turn in enumerate(row.turns, 1)]
            texts = [{name: fenced(text, most), "observed": fenced(seen, most)} for name, text, seen in turns]
            shown.append(
                {key: getattr(row, key) for key in _FIGURES}
                | {"end": row.ending, "tokens": row.size, "prompt": fenced(row.prompt, most)}
                | ({"turns": texts[:8]} if texts else {"completion": fenced(row.completion, most)})
                | {"answer": fenced(row.answer, most) if row.answer else ""}
                | {"error": fenced(row.error, most) if row.error else ""}
            )
        return {"samples": shown}

    def log(self, run: str, of: str = "driver", grep: str = "", characters: int = 4000) -> Answer:
        """The end of a log of a run (driver, pool, trainer, engine-0), as untrusted text.

        grep: only lines with these words, as `lorad logs --grep` takes them: `nan "out of memory" !eval`.
        """
        most = max(1, min(characters, _LOG_CHARACTERS))
        text = self._client.logs(run, of=of, offset=-(_LOG_BYTES if grep else 4 * most)).text
        if grep:
            sought = words(grep)
            text = "\n".join(line for line in text.splitlines() if has_words(line, sought))
        return {"text": fenced(text[-most:], most)}

    def events(self, after: int = 0, run: str = "", limit: int = 50) -> Answer:
        """What happened since the event `after`, oldest first; ask again with `next`."""
        recent = self._client.history(run or None, limit=_EVENTS)
        newer = [event for event in recent if event.id > after]
        shown = newer[: max(1, limit)] if after else newer[-max(1, limit) :]
        events = [to_builtins(event) for event in shown]
        for event in events:
            data = event["data"]
            if "metrics" in data:  # `curves` has the others
                figures = {name: data["metrics"].get(name) for name in ("reward", "loss")}
                event["data"] = {"step": data.get("step"), "version": data.get("version"), **figures}
        more = len(newer) - len(shown) if after else 0
        return {"next": shown[-1].id if shown else after, "more": more, "events": events}

    def wait(
        self, names: Sequence[str] = (), sweep: str = "", until: str = "", seconds: float = _PATIENCE
    ) -> Answer:
        """Wait at most 50 seconds until runs, or all of a sweep, are over; call again while some are not.

        until: a condition that is enough: `eval>0.9`, `step>=20`, `loss<0.1`.
        """
        deadline = time.monotonic() + min(max(seconds, 0.0), _PATIENCE)
        expected = condition(until) if until else None
        if sweep:
            names = [*names, *(run.name for each in self._client.sweeps(sweep) for run in each.runs)]
        connection = DaemonConnection(self._client, start=False)
        pending = []
        for name in dict.fromkeys(names):
            try:
                left = max(0.0, deadline - time.monotonic())
                wait_for(connection, name, until=expected, timeout=left)
            except TimedOut:
                pending.append(name)
            except (RunFailed, NotReached):  # its state says so
                continue
        shown = [brief(self._client.show(name)) for name in dict.fromkeys(names)]
        more = own("Not all are so far: call again.") if pending else ""
        return {"runs": shown, "pending": pending, "next": more}

    def check(self, spec: str, overrides: Sequence[str] = ()) -> Answer:
        """Check a spec as `run` would: what it comes to, what it needs, whether it would start now.

        spec: YAML, or the name of its .yaml file.
        overrides: KEY=VALUE.
        """
        text = self._bounds.spec_text(spec)
        self._bounds.spec_within(text, overrides)
        request = RunRequest(text, "spec", str(self._bounds.base), [*overrides])
        checked = to_builtins(self._client.check(request))
        return {key: value for key, value in checked.items() if key not in ("spec", "memory_parts")}

    def spec(self, key: str) -> Answer:
        """Keys of a spec with default and meaning: one (trainer.lr), those of a section, or by a word."""
        from lorad.tui.spec_lines import value_text

        keys = keys_like(key)
        rows = [{"key": own(k.name), "values": own(k.values), "meaning": own(k.meaning)} for k in keys]
        defaults = [own("required") if k.default is NODEFAULT else own(value_text(k.default)) for k in keys]
        return {"keys": [row | {"default": value} for row, value in zip(rows, defaults, strict=True)]}
