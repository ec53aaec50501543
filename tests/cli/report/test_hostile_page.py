"""What a model, a user or a file wrote is text of the page, and no larger than the page allows."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.alarms import Alarm
from lorad.bounds import TEXT
from lorad.cli.commands.report import sections
from lorad.cli.commands.report.facts import RunFacts
from lorad.cli.commands.report.page import page
from lorad.cli.commands.report.parts import PageText
from lorad.protocol.evals import Expected, SetScore
from lorad.records.episodes import EpisodeTurn
from lorad.records.measured import Evaluation, Result
from lorad.records.runs import Attempt, Beginning, RunDetails
from lorad.records.versions import Version
from lorad.tui.curves.series import Series, Track
from lorad.why.finding import Finding, Why
from tests.cli.report.kit import NASTY, Taken, a_sample, facts_of, refuse_loading

MOST = 16 << 20  # bytes, as docs/cli.md says


def written(whole: str, size: int = 1) -> RunFacts:
    """A run all of whose texts are somebody's, as long as lorad keeps them. size: times as many of all."""
    text = whole[:TEXT]
    turns = [EpisodeTurn(whole, text[:16], 3, observation=whole)] * (20 * size)
    run = RunDetails(
        *(text[:256], "ended", "failed", text),
        owner=text[:99],
        base=text[:4096],
        tags=[text[:99]] * size,
        note=text[:4096],
        spec={"model": {"path": text[:4096]}, "rollout": {"engine_args": {text[:128]: whole * 4}}},
        attempts=[Attempt(1, reason="failed", detail=text)] * (5 * size),
        warnings=[text] * (25 * size),
        results=[Result("a", 1, data=text, metrics={text[:128]: 1.0})] * (10 * size),
        expected=[Expected(text, 3, 0.1, 0.2, text)] * (10 * size),
        begun=Beginning(1, text, text, inputs={f"{n}{text}"[:4096]: text for n in range(100 * size)}),
    )
    sets = {f"{n}{text}"[:128]: SetScore(0.5, 9, 0) for n in range(20 * size)}
    evals = [Evaluation(step, score=0.5, problems=9, sets=sets) for step in range(400)]
    track = Track()
    track.steps = array("q", range(400))
    for name in ("reward", "kl", "loss", "entropy", "lr", "eval", *(f"eval/{name}" for name in sets)):
        series = Series()
        for step in range(400):
            series.add(step, step % 7 * 1e-5)
        track.series[name] = track.sets[name] = series
    return RunFacts(
        run,
        track,
        evals,
        [(text, a_sample(whole, turns=turns, error=text, rewards={text[:128]: 1.0})) for _ in range(32)],
        {"main": (0.0, 1.0)},
        [text] * size,
        [Version(text, n, 0, text[:64], attestation=text, aliases=[text[:256]]) for n in range(100 * size)],
        why=Why("a", [Finding(text, "cause", text, {}, text)] * (10 * size), text, text),
        alarms=[Alarm("bad", "kl", "run", text, text)] * (10 * size),
    )


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_whatever_was_written_stays_text(text: str) -> None:
    shown = page([written(text), written("plain")], 0.0)
    shown.encode()
    refuse_loading(shown)
    assert all(character.isprintable() or character in "\n\t" for character in shown)


@settings(max_examples=40)
@given(st.text("<>&'\"/!-=sx \x00\u202e"))
def test_no_text_changes_the_elements_of_a_page(text: str) -> None:
    room, plain = PageText(100_000), PageText(100_000)
    shown = sections.samples(facts_of(samples=[("x", a_sample(f"{text}x"))], notes=[text]), room)
    assert (
        Taken(shown).elements
        == Taken(sections.samples(facts_of(samples=[("x", a_sample("x"))], notes=["x"]), plain)).elements
    )


def test_long_text_is_cut_in_its_middle() -> None:
    shown = sections.samples(
        facts_of(samples=[("x", a_sample("begin" + "<" * 10_000_000 + "end"))]), PageText(10_000)
    )
    assert len(shown) < 60_000
    assert "begin&lt;" in shown and "… 9,997,008 characters left out …" in shown and "&lt;end" in shown


@pytest.mark.system
def test_the_largest_page_is_within_its_bound() -> None:
    one = written("\U000e0001" * 9_000, 2)
    assert len(page([one] * 26, 0.0).encode()) < MOST
    assert len(page([one], 0.0).encode()) < MOST


def test_a_run_with_nothing_has_a_page() -> None:
    shown = page([facts_of(), facts_of(run=RunDetails("b", "queued"))], 0.0)
    refuse_loading(shown)
    assert "<polyline" not in shown
