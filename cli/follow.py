"""Follow a run until it is over, and report how it ended.

A terminal gets a live view, everything else a line per step. Ctrl-C detaches.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import typer

from lorad.alarms import alarms
from lorad.cli import output, table
from lorad.cli.many import OVER
from lorad.client import launch
from lorad.client.boxes.hosts import limits_of
from lorad.client.client import Client
from lorad.client.columns import seconds_left
from lorad.client.words import evals_in_words, failures, idleness, phase, starts_in_words, steps_in_words
from lorad.errors import DaemonUnreachable, LoradError
from lorad.records.measured import Evaluation, Metrics, Step
from lorad.records.runs import Run, RunDetails
from lorad.records.samples import Sample
from lorad.text import clauses, one_line

_PERIOD = 0.25  # seconds between looks
_QUIET = 10.0  # seconds without a line, after which one says what a run is doing
_FRESH = 3.0  # seconds after a step in which its figures say enough
_SAMPLE = 2.0  # seconds between two completions: quicker steps do not all show theirs
WORKING = ("running", *OVER)
_GOOD = ("completed", "stopped")
_BAR = 24  # cells of the bar
_MARGIN = 3  # cells that are free at the end of the line for a ^C that the terminal echoes
_SUPERVISED = (  # figures of a step without samples: digits, and what is left out first of a narrow line
    ("loss", 4, 0),
    ("perplexity", 3, 1),
    ("token_accuracy", 3, 2),
    ("pair_accuracy", 2, 1),
    ("reward_margin", 2, 2),
    ("chosen_reward", 3, 3),
    ("rejected_reward", 3, 3),
    ("held_out_loss", 4, 2),
    ("held_out_token_accuracy", 3, 3),
    ("held_out_pair_accuracy", 2, 2),
)
_CLEARED = "\x1b[1A\x1b[2K\r"  # the line above, as if it had never been


def follow(
    client: Client,
    name: str,
    *,
    as_json: bool,
    quiet: bool = False,
    until: Sequence[str] = OVER,
    restart: Callable[[Client], None] = launch.start,
) -> None:
    """Follow a run until it is over or the user detaches, and exit 1 unless it ended as it should.

    quiet: show no completions.
    until: return as soon as it has one of these states.
    restart: what is done about a daemon that dies meanwhile.
    """
    run = watched(client, name, as_json=as_json, quiet=quiet, until=until, restart=restart)
    if run is None:
        return
    output.note_or_json(run, conclusion(run), as_json=as_json)
    if run.state == "ended" and run.reason not in _GOOD:
        raise typer.Exit(1)


def watched(
    client: Client,
    name: str,
    *,
    as_json: bool,
    quiet: bool = True,
    until: Sequence[str] = OVER,
    does: str = "continues",
    restart: Callable[[Client], None] = launch.start,
) -> RunDetails | None:
    """Show how far a run is until it has one of these states; None where the user detached.

    does: what the run does all the same where the user detaches. The other arguments are those of `follow`.
    """

    def first_sample(step: int) -> Sample | None:
        with suppress(LoradError):  # its file is gone, or so is the daemon
            return next(iter(client.samples(name, step=step, limit=1, brief=True)), None)
        return None

    live = LiveLine(None if quiet else first_sample) if sys.stderr.isatty() and not as_json else None
    view = None if as_json else live or _RunLines()
    screen: AbstractContextManager[object, None] = nullcontext() if live is None else live.live
    try:
        with screen:
            return _watch(client, name, view, until, restart)
    except KeyboardInterrupt:
        if live is not None:
            print(_CLEARED, end="", file=sys.stderr, flush=True)
        output.note(f"Detached; {name} {does}: `lorad logs {name} -f`.")
        return None


def _watch(
    client: Client,
    name: str,
    view: "LiveLine | _RunLines | None",
    until: Sequence[str],
    restart: Callable[[Client], None],
) -> RunDetails:
    step = None
    evaluated = -1
    attempt = 0
    limits = limits_of(client.where)
    raised = set[str]()  # kinds of alarms
    while True:
        try:
            run = client.show(name)
            if step is None or run.attempt != attempt:  # what an earlier attempt did is not printed again
                attempt = run.attempt
                step = run.step
                evaluated = step or -1
            step = min(step, run.step)
            steps = client.steps(name, after=step)
            evals = [e for e in client.evals(name) if e.step > evaluated]
        except DaemonUnreachable:
            restart(client)
            continue
        if view is not None:
            view.update(run, steps, evals)
            for alarm in alarms([run], limits) if run.state == "running" else []:
                if alarm.kind not in raised:
                    raised.add(alarm.kind)
                    view.say(f"alarm: {alarm.says}")
        step = steps[-1].step if steps else step
        evaluated = evals[-1].step if evals else evaluated
        if run.state in until:
            return run
        time.sleep(_PERIOD)


class _RunLines:
    """Prints a line when something changes: for logs and pipes."""

    def __init__(self) -> None:
        self._said = ("", "", 0)
        self._quiet_since = time.monotonic()
        self._doing = ""

    def update(self, run: RunDetails, steps: list[Step], evals: list[Evaluation]) -> None:
        waits = _waits(run)
        said = (phase(run), run.waiting, len(waits))  # not each minute that it comes nearer
        if said != self._said and run.state not in OVER:  # the verb prints last how it ended
            self._said = said
            self.say(f"{run.name}: {phase(run)}" + (f" ({'; '.join(waits)})" if waits else ""))
        for step in steps:
            figures = "  ".join(text for text, _ in _ranked(step.metrics))
            self.say(f"step {step.step}{f'/{run.steps}' * bool(run.steps)}  {figures}")
        for evaluation in evals:
            self.say(_evaluation(evaluation))
        if run.doing not in ("", self._doing) and time.monotonic() - self._quiet_since > _QUIET:
            self._doing = run.doing
            self.say(f"{run.name}: {run.doing}")

    def say(self, words: str) -> None:
        output.note(words)
        self._quiet_since = time.monotonic()


class LiveLine:
    """Shows a line with a bar, what the run is doing and its last figures, below evaluations and completions.

    sample: finds the completion of a step that is shown; None where none is.
    """

    def __init__(self, sample: Callable[[int], Sample | None] | None = None) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.live = RichLive(console=Console(stderr=True), auto_refresh=False)
        self._figures: list[tuple[str, int]] = []
        self._sample = sample
        self._sampled_at = float("-inf")
        self._stepped_at = float("-inf")

    def update(self, run: RunDetails, steps: list[Step], evals: list[Evaluation]) -> None:
        from rich.text import Text

        if steps:
            self._figures = _ranked(steps[-1].metrics)
            self._stepped_at = time.monotonic()
            # its first completion on a line, unless another one was shown just now
            is_due = self._stepped_at - self._sampled_at >= _SAMPLE and "response_length" in steps[-1].metrics
            if self._sample and is_due and (sample := self._sample(steps[-1].step)) is not None:
                self._sampled_at = time.monotonic()
                width = self.live.console.width
                answer = f" (answer {_one_line(sample.answer, width // 4)})" if sample.answer else ""
                reward = output.number(sample.reward) or "failed"
                words = f"step {steps[-1].step}, one sample: {reward}{answer}  "
                self.say(f"{words}{_one_line(sample.completion, max(width - table.cells(words), 1))}")
        for evaluation in evals:
            self.say(_evaluation(evaluation))
        left = seconds_left(run)
        eta = [] if left is None else [(f"ETA {output.duration(left)}", 1)]
        is_fresh = time.monotonic() - self._stepped_at < _FRESH
        doing = [(run.doing, 0)] if run.doing and not is_fresh else []
        after = [(words, 0) for words in _waits(run)] or [*doing, *self._figures, *eta]
        progress = [(f"{run.name} {phase(run)} {steps_in_words(run)}", 0)]
        if run.steps:
            done = min(run.step / run.steps, 1.0)
            bar = int(_BAR * done)
            progress += [("━" * bar + "─" * (_BAR - bar), 6), (f"{done:.0%}", 4)]
        parts = [*progress, *after]
        width = self.live.console.width - _MARGIN
        # the highest ranks go until the line fits, and rank 0 stays
        line = "  ".join(text for text, _ in parts)
        while table.cells(line) > width and (worst := max(rank for _, rank in parts)):
            parts = [part for part in parts if part[1] != worst]
            line = "  ".join(text for text, _ in parts)
        line = table.shortened(line, width)
        self.live.update(Text(output.printable(line), no_wrap=True), refresh=True)

    def say(self, words: str) -> None:
        self.live.console.print(output.printable(words), markup=False, highlight=False)


def _one_line(text: str, width: int) -> str:
    """Return the beginning of a text in so many cells: a model wrote it, so it may have any character."""
    return table.shortened(one_line("⏎".join(text.strip()[: 4 * width].splitlines())), width)


def _waits(run: Run) -> list[str]:
    """Say when a queued run will start, where that is known, and what it waits for."""
    starts = starts_in_words(run)
    return [words for words in (starts and f"starts {starts}", run.waiting) if words]


def _ranked(m: Metrics) -> list[tuple[str, int]]:
    """Return the figures of a step, each with its rank: a narrow line leaves out the highest ranks first."""
    speed = f"{output.number(m['tokens_per_second'], 0)} tok/s"
    if "response_length" not in m:  # nothing was sampled
        measured = [(key, digits, rank) for key, digits, rank in _SUPERVISED if m.get(key) is not None]
        figures = [
            (f"{key.replace('_', ' ')} {output.number(m[key], digits)}", rank)
            for key, digits, rank in measured
        ]
        return [*figures, (speed, 4)]
    reward, loss, kl = (
        f"{key} {output.number(m.get(key), digits) or '-'}"
        for key, digits in (("reward", 3), ("loss", 4), ("kl", 4))
    )
    failed = [(f"{m['failed_rewards']:.0f} rewards failed", 1)] if m.get("failed_rewards") else []
    sampled = m.get("prompts_sampled")
    used = [(f"{m['prompts_used']:.0f} of {sampled:.0f} prompts used", 2)] if sampled else []
    critic = []
    if "value_loss" in m:
        explained, missed = (
            output.number(m.get(key), digits) or "-"
            for key, digits in (("explained_variance", 2), ("value_loss", 4))
        )
        alone = "" if m.get("updates") else ", alone"
        critic = [(f"critic: explained {explained}, loss {missed}{alone}", 1)]
    return [(reward, 0), (loss, 3), (kl, 5), (speed, 2), *critic, *used, *failed]


def _evaluation(evaluation: Evaluation) -> str:
    failed = f", {evaluation.failed} rewards failed" if evaluation.failed else ""
    scored = evaluation.problems - evaluation.failed
    means = []
    if evaluation.score is not None:
        means.append(f"{output.number(evaluation.score)} on {scored} problems{failed}")
    if evaluation.nll is not None:
        means.append(f"nll {evaluation.nll:.4f}, perplexity {output.number(evaluation.perplexity)}")
    if evaluation.token_accuracy is not None:
        means.append(f"{evaluation.token_accuracy:.1%} of tokens right")
    if evaluation.accuracy is not None:
        means.append(f"{evaluation.accuracy:.0%} of pairs right")
    sets = [f"{name} {output.number(result.score) or '-'}" for name, result in evaluation.sets.items()]
    return f"held-out eval at step {evaluation.step}: {'; '.join([', '.join(means) or '-', *sets])}"


def conclusion(run: RunDetails) -> str:
    """Say how a run ended, or that it works."""
    name = run.name
    where = f"step {steps_in_words(run, ' of ')}"
    if run.state not in OVER:
        return f"{name} is {phase(run)} at {where}; `lorad attach {name}` follows it."
    if run.state == "paused":
        return f"{name} is paused at {where}; `lorad resume {name}` continues."
    ended_early = run.reason == "completed" and run.step < run.steps
    detail = f": {run.detail}" if run.detail and (ended_early or run.reason not in _GOOD) else ""
    evals = evals_in_words(run) and f"held-out eval {evals_in_words(run)}"
    how = f"`lorad resume {name}` continues" if run.reason == "lost" and "`lorad resume" not in detail else ""
    ended = f"{name} ended ({run.reason}) at {where}{detail}"
    expected = "; ".join(expectation.in_words for expectation in run.expected)
    return clauses(ended, evals, expected, failures(run), idleness(run), how)
