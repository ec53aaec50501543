"""lorad report: what the page says of runs, from the answers of a world that does not move."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from lorad.cli.app import app
from lorad.cli.commands.report import sections
from lorad.cli.commands.report.facts import read
from lorad.cli.commands.report.page import page
from lorad.cli.commands.report.parts import PageText
from lorad.client.client import Client
from lorad.errors import Conflict, LoradError, NotFound, SpecError
from lorad.protocol.evals import Expected, SetScore
from lorad.records.measured import Evaluation
from lorad.records.runs import RunDetails
from lorad.records.versions import Version
from lorad.why.finding import Finding, Why
from tests.cli.report.kit import facts_of, texts
from tests.kit.frozen.runs import NOW
from tests.kit.frozen.world import frozen

__all__ = ["frozen"]
Typed = Callable[..., str]


@pytest.fixture
def typed(frozen: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """What `lorad report …` prints, on stdout and then on stderr."""
    monkeypatch.setenv("LORAD_HOME", str(frozen.home.root))

    def run(*arguments: str) -> str:
        app(["report", *arguments], standalone_mode=False)
        return "".join(capsys.readouterr())

    return run


def test_page_has_all_that_a_run_left(frozen: Client) -> None:
    shown = page(read(frozen, ["sorter"]), NOW)
    headings = (
        "sorter, Curves, Findings, Held-out evaluations, Samples, Versions, Cost, Machine and inputs, Spec"
    )
    assert ", ".join(re.findall("<h[123]>(.*?)</h[123]>", shown)) == headings
    said = texts(shown)
    assert any(text.startswith("running · 42 of 60 steps · reward ") for text in said)
    assert {"held-out eval", "KL to the reference, nats per token", "@42", "passed"} < said
    assert shown.count("<polyline") > 10


def test_several_runs_share_axes_and_a_table(frozen: Client) -> None:
    shown = page(read(frozen, ["sorter", "bold-lr"]), NOW)
    figure = shown[shown.index("<figure") : shown.index("</figure>")]
    assert {"A sorter", "B bold-lr", "reward"} < texts(figure)
    table = shown[shown.index("Side by side") : shown.index("</table>")]
    assert re.findall("<td>model.path</td><td>(.*?)</td><td>(.*?)</td>", table) == [
        ("builtin:tiny", "Qwen/Qwen3-8B")
    ]
    assert re.findall('<h2>(.*?)</h2>|href="(.*?)"|id="(.*?)"', shown) == [
        *(("", "#run-0", ""), ("", "#run-1", ""), ("", "", "run-0"), ("A sorter", "", "")),
        *(("", "", "run-1"), ("B bold-lr", "", "")),
    ]


def test_samples_are_extremes_of_first_and_last_step(frozen: Client) -> None:
    (facts,) = read(frozen, ["one-answer"])
    rewards = {says: sample.reward for says, sample in reversed(facts.samples)}
    last = [one.reward for one in frozen.samples("one-answer") if one.reward is not None]
    assert rewards["step 88, best"] == max(last) > min(last) == rewards["step 88, worst"]
    assert {says.rpartition(",")[0] for says in rewards} == {
        *("step 88", "held-out main, step 80", "held-out hard, step 10", "held-out hard, step 80")
    }


def test_scores_have_the_intervals_of_their_rewards() -> None:
    scored = Evaluation(4, version=4, score=0.5, problems=104, failed=4)
    sets = {"hard": SetScore(-0.5, 100, 0), "seen": SetScore(0.1, 9, 0)}
    row = replace(scored, sets=sets)
    facts = facts_of(evals=[row], rewards={"main": (0.0, 1.0), "hard": (-1.0, 1.0)})
    said = texts(sections.evaluations(facts, PageText(10_000)))
    assert {"0.500 (0.404–0.596)", "-0.500 (-0.649–-0.314)", "0.100"} < said


def test_a_long_run_makes_no_long_page(frozen: Client) -> None:
    (facts,) = read(frozen, ["million"])
    assert len(facts.track.steps) <= 401 and len(facts.evals) <= 400
    assert len(page([facts], NOW)) < 150_000


def test_secrets_of_an_old_spec_are_hidden() -> None:
    args = {"env": ["A=hf_" + "a" * 30], "api_key": "swordfish", "eos_token": "</s>"}
    spec = {"rollout": {"engine_args": args}}
    shown = sections.spec(facts_of(run=RunDetails("a", "ended", spec=spec)), PageText(10_000))
    assert "hf_" not in shown and "swordfish" not in shown and "(hidden)" in shown and "&lt;/s&gt;" in shown


def test_findings_and_expectations_are_told() -> None:
    expected = [Expected("eval", 116, 0.52, 0.57, "verl", "missed", 0.41)]
    why = Why("a", [Finding("floor", "cause", "No reward is above 0.", {}, "lorad samples a")], "It has.", "")
    shown = sections.findings(
        facts_of(RunDetails("a", "ended", expected=expected), why=why), PageText(10_000)
    )
    assert '<li class="bad">eval missed 0.410 at 116, expected 0.52 to 0.57 (verl)</li>' in shown
    assert '<b class="bad">floor</b> No reward is above 0.' in shown and "lorad samples a" in texts(shown)


def test_versions_say_what_attested_them() -> None:
    rows = [Version("a", n, sha256=f"{n:064x}", attested="passed", attestation=f"z {n}") for n in range(50)]
    rows[7] = replace(rows[7], aliases=["bot"], attested="inconclusive")
    said = texts(sections.versions(facts_of(versions=rows), PageText(100_000)))
    assert {"@0", "@7", "bot", f"{7:064x}", "inconclusive", "z 7", "@49"} < said and "@8" not in said
    assert any(text.startswith("50 versions: 49 passed, 1 inconclusive.") for text in said)


def test_file_is_whole_and_not_replaced_unasked(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    assert f"Written to {file}" in typed("sorter", "-o", str(file))
    first = file.read_text()
    assert first.endswith("</html>\n") and [*tmp_path.iterdir()] == [file]
    with pytest.raises(Conflict):
        typed("bold-lr", "-o", str(file))
    assert file.read_text() == first
    typed("bold-lr", "-o", str(file), "--force")
    assert "<title>bold-lr: lorad" in file.read_text()


def test_a_dash_writes_to_stdout(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed("sorter", "-o", "-").startswith("<!doctype html>") and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (("gone", "-o", "a.html"), NotFound, "no run named gone"),
        (("gone", "-o", "a.pdf"), SpecError, "a.pdf does not end with .html"),
        ((), SpecError, "no run was named"),
    ],
)
def test_mistakes_are_refused(
    arguments: tuple[str, ...],
    error: type[LoradError],
    told: str,
    typed: Typed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        typed(*arguments)
    assert told in raised.value.message and [*tmp_path.iterdir()] == []
