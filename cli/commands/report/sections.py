"""Write the sections of a page about one run as HTML; "" where there is nothing to say."""

import time
from collections import Counter

from lorad.cli.commands.report.facts import RunFacts, spread
from lorad.cli.commands.report.parts import PageText, fields, section, table, tag
from lorad.cli.commands.samples import whole
from lorad.cli.commands.show import described
from lorad.client.bill_words import bill_words
from lorad.protocol.evals import interval
from lorad.records.measured import Evaluation
from lorad.spec.kept import MAIN
from lorad.spec.secrets import hidden
from lorad.text import duration, number, size
from lorad.tui.spec_lines import differing, flat, text_of

_EVALS = 40  # rows
_FIGURES = 12  # columns
_VERSIONS = 10  # rows
_ROWS = 20  # attempts, warnings, alarms, results
_INPUTS = 60  # packages, and files that were hashed
_VALUE = 3_000  # characters of one text of a sample
_SAMPLE = 8_000  # characters of all of it
_FIELDS = 60  # of a sample
_SPEC = 30_000  # characters
_OF_A_BILL = ("what", "owner", "disk")  # that say nothing of the run's cost
_OF_THIS_BOX = ("run", "directory", "files", "processes", "created")  # facts that say nothing here
_LISTS = ("set", "result", "attempt", "warning", "expect")
_SEVERITIES = {"cause": "bad", "look": "look"}  # of findings, as alarms have them
_OUTCOMES = {"met": "met", "missed": "bad", "not reached": "look", "pending": "pending"}


def findings(facts: RunFacts, room: PageText) -> str:
    """Say what `lorad why` finds, and which expectations of the spec are met."""
    expected = "".join(
        tag("li", room.text(expectation.in_words), class_=_OUTCOMES[expectation.outcome])
        for expectation in facts.run.expected[:_ROWS]
    )
    met = section("Expected figures", tag("ul", expected) if expected else "")
    if facts.why is None:
        return met
    items = []
    for finding in facts.why.findings[:_ROWS]:
        name = tag("b", room.text(finding.name), class_=_SEVERITIES[finding.severity])
        says = room.text(finding.says)
        items.append(tag("li", name, " ", says, " Try: ", tag("code", room.text(finding.next))))
    nothing = "" if items else "Nothing was found that keeps it from learning. "
    note = tag("p", room.text(f"{nothing}{facts.why.says} {facts.why.looked}", 2000), class_="note")
    return met + section("Findings", tag("ul", *items) if items else "", note)


def about(facts: RunFacts, room: PageText) -> str:
    """Say how the run stands, and how its attempts ended."""
    run = facts.run
    pairs = described(run)
    lists = {name: [value for key, value in pairs if key == name][-_ROWS:] for name in _LISTS}
    lines = [(key, value) for key, value in pairs if key not in (*_OF_THIS_BOX, *_LISTS)]
    lines.append(("created", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.created_at))))
    if run.started_at is not None and run.ended_at is not None:
        lines.append(("took", duration(run.ended_at - run.started_at)))
    lines += [(name, value) for name in ("set", "result", "attempt") for value in lists[name]]
    items = "".join(tag("li", room.text(value)) for value in lists["warning"])
    raised = "".join(tag("li", room.text(alarm.says), class_=alarm.level) for alarm in facts.alarms[:_ROWS])
    return fields((name, room.text(value)) for name, value in lines) + section(
        "Alarms and warnings", tag("ul", raised, items) if raised or items else ""
    )


def evaluations(facts: RunFacts, room: PageText) -> str:
    """List what was measured on held-out problems, scores with their intervals."""
    names = list(dict.fromkeys(name for evaluation in facts.evals for name in evaluation.figures))[:_FIGURES]
    rows = []
    for evaluation in spread(facts.evals, _EVALS):
        figures = []
        for name in names:
            value = evaluation.figures.get(name)
            ends = None if value is None else bounds(evaluation, name, facts)
            brackets = "" if ends is None else f" ({number(ends[0])}–{number(ends[1])})"
            figures.append(room.text(f"{number(value)}{brackets}"))
        counts = (str(evaluation.problems or ""), str(evaluation.failed or ""))
        rows.append([str(evaluation.step), f"@{evaluation.version}", *figures, *counts])
    heads = ["step", "version", *(room.text(name) for name in names), "problems", "failed rewards"]
    note = tag(
        "p",
        "In brackets the interval in which the mean over all such problems lies with 95 % (Wilson's; for "
        "rewards between two values it is at most so wide).",
        class_="note",
    )
    return section("Held-out evaluations", table(heads, rows), note) if rows else ""


def bounds(evaluation: Evaluation, name: str, facts: RunFacts) -> tuple[float, float] | None:
    """Return the interval of a score; None for what is no score, or whose rewards were not kept."""
    name_of_set = MAIN if name == "eval" else name.removeprefix("eval/")
    score = evaluation.score
    problems = evaluation.problems
    failed = evaluation.failed
    if name_of_set in evaluation.sets:
        score = evaluation.sets[name_of_set].score
        problems = evaluation.sets[name_of_set].problems
        failed = 0
    elif name_of_set != MAIN:
        return None
    if score is None or problems <= failed or name_of_set not in facts.rewards:
        return None
    return interval(score, problems - failed, *facts.rewards[name_of_set])


def samples(facts: RunFacts, room: PageText) -> str:
    """Show the best and the worst samples of the first and the last step, with the turns of an episode."""
    notes = [tag("p", room.text(note), class_="note") for note in dict.fromkeys(facts.notes)]
    shown = []
    for says, sample in facts.samples:
        lines = list[tuple[str, str]]()
        left = _SAMPLE
        for name, value in [line for line in whole(sample) if line[0] not in ("step", "reward")][:_FIELDS]:
            most = min(_VALUE, left)
            lines.append((room.text(name), tag("pre", room.text(value, most))))
            left -= min(len(value), most)
        head = f"{says}: reward {number(sample.reward) or 'none'}, {sample.size:,} tokens"
        shown.append(tag("article", tag("h4", room.text(head)), fields(lines)))
    return section("Samples", tag("div", *shown, class_="samples") if shown else "", *notes)


def spec(facts: RunFacts, room: PageText) -> str:
    """Show where the spec differs from the defaults, and all of it behind a line that opens it."""
    values = flat(hidden(facts.run.spec))
    own = tag("pre", room.text(text_of(differing(values)), _SPEC))
    whole_spec = tag("pre", room.text(text_of(values), _SPEC))
    return section("Spec", own, tag("details", "<summary>with its defaults</summary>", whole_spec))


def versions(facts: RunFacts, room: PageText) -> str:
    """List the versions that are used, the best and the newest, with what attested each."""
    every = facts.versions
    run = facts.run
    best = None if run.best is None else run.best.version
    used = [version for version in every if version.aliases or version.pinned or version.version == best]
    shown = {version.version: version for version in [*every[:1], *used[:_VERSIONS], *every[-_VERSIONS:]]}
    verdicts = Counter(version.attested or "not attested" for version in every)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    note = (
        f"{len(every):,} versions: {counts}. A version is attested before one token of it is trained on: the "
        "engine has shown that it serves the adapter with this sha256, by log-probabilities that it shares "
        "with the trainer."
    )
    rows = [
        [
            f"@{number}",
            str(version.step),
            tag("code", room.text(version.sha256)),
            room.text(version.attested, most=40),
            room.text(version.attestation),
            room.text(
                ", ".join([*version.aliases, *["best"] * (number == best), *["pinned"] * version.pinned])
            ),
        ]
        for number, version in sorted(shown.items())
    ]
    if not rows:
        return ""
    heads = ("version", "step", "sha256", "attested", "how", "used as")
    about = tag("p", room.text(note, len(note)), class_="note")
    return section("Versions", about, table(heads, rows))


def cost(facts: RunFacts, room: PageText) -> str:
    """Say what the run used, as its bill has it."""
    if facts.bill is None:
        return ""
    words = bill_words("run", facts.bill, facts.currency)
    return section("Cost", fields((name, room.text(words[name])) for name in words if name not in _OF_A_BILL))


def machine(facts: RunFacts, room: PageText) -> str:
    """Say what the newest attempt ran on and read: devices, versions of packages, digests of files."""
    begun = facts.run.begun
    devices = [f"{d.device}: {d.name}, {size(d.memory_total)}" for d in facts.devices[:_ROWS]]
    lines = [("devices of its pool", ", ".join(devices))]
    if begun is not None:
        read = {"data": begun.data_sha256, "model": begun.model_sha256, **begun.inputs}
        lines += [("trainer", begun.trainer), ("engine", begun.engine)]
        lines += list(begun.software.items())[:_INPUTS]
        lines += [(f"sha256 of {name}", sha256) for name, sha256 in list(read.items())[:_INPUTS]]
    return section("Machine and inputs", fields((room.text(k), room.text(v)) for k, v in lines if v))
