"""Many runs at once: which runs words mean, how a list shows them, and verbs that take several."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.cli import listing
from lorad.cli.app import app
from lorad.client.client import Client
from lorad.errors import Conflict, LoradError, NotFound, SpecError
from lorad.records.runs import Run
from lorad.selection import Selection
from tests.kit.frozen.world import frozen
from tests.kit.pty_kit import Terminal

__all__ = ["frozen"]
Typed = Callable[..., Any]


@pytest.fixture
def typed(frozen: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """What a command prints on stdout, with `--json` as data; its exit code as `typed.code`."""
    monkeypatch.setenv("LORAD_HOME", str(frozen.home.root))

    def run(*arguments: str) -> Any:
        capsys.readouterr()
        run.code = app(list(arguments), standalone_mode=False) or 0  # type: ignore[attr-defined]
        out, run.told = capsys.readouterr()  # type: ignore[attr-defined]
        return json.loads(out) if "--json" in arguments else out

    return run


def names(runs: list[Run]) -> set[str]:
    return {run.name for run in runs}


@pytest.mark.parametrize(
    ("selection", "meant"),
    [
        (Selection(state=["failed", "lost"]), {"gsm8k-32k", "night-shift"}),
        (Selection(state=["ended"], owner=["bob"]), {"night-shift"}),
        (Selection(names=["support-*", "waits"]), {"support-bot", "support-bot-fork", "support-v3", "waits"}),
        (Selection(names=["waits[!-]*", "[!a-r]aits"]), {"waits"}),
        (Selection(names=["sorter", "support-bot"], base=["*tiny"]), {"sorter"}),
        (Selection(names=["support-bot"], base=["Qwen3-8B"]), {"support-bot"}),
        (Selection(state=["ended"], older=20 * 3600), {"support-v3"}),
        (Selection(state=["queued"], newer=600), {"waits"}),
        (Selection(names=["sup"]), set()),
    ],
)
def test_a_selection_means_what_fits_all_of_it(frozen: Client, selection: Selection, meant: set[str]) -> None:
    assert names(frozen.select(selection)) == meant


def test_me_is_whoever_asks(frozen: Client) -> None:
    assert frozen.select(Selection(owner=["me"])) == []  # nobody of that world
    assert names(frozen.select(Selection(owner=["ann"]))) > {"sorter", "bold-lr"}


def test_runs_are_chosen_by_their_tags(frozen: Client, typed: Typed) -> None:
    frozen.label("sorter", add=["paper-2", "good"])
    frozen.label("waits", add=["good"])
    assert names(frozen.select(Selection(tag=["good"]))) == {"sorter", "waits"}
    assert names(frozen.select(Selection(tag=["go*"], state=["queued"]))) == {"waits"}
    assert [run["name"] for run in typed("list", "--tag", "paper-*,bad", "--json")] == ["sorter"]
    for run in ("sorter", "waits"):
        frozen.label(run, remove=["good", "paper-2"])


def test_a_run_is_renamed_and_back(frozen: Client, typed: Typed) -> None:
    assert typed("rename", "waits", "later", "--json")["name"] == "later"
    assert names(frozen.select(Selection(state=["queued"]))) >= {"later"}
    assert typed("rename", "later", "waits", "--json")["name"] == "waits"


def test_a_list_is_sorted_before_it_is_cut(frozen: Client) -> None:
    everything = frozen.select(Selection(), sort=["-reward"])
    rewards = [run.reward for run in everything if run.reward is not None]
    assert rewards == sorted(rewards, reverse=True)
    assert [run.reward for run in everything[len(rewards) :]] == [None] * (len(everything) - len(rewards))
    assert frozen.select(Selection(), sort=["-reward"], limit=3) == everything[:3]
    by_state = frozen.select(Selection(), sort=["owner", "-kl"], keys=["kl"])
    pairs = [(run.owner, -run.values["kl"]) for run in by_state if run.values["kl"] is not None]
    assert pairs == sorted(pairs)


def test_columns_are_of_run_spec_and_last_step(frozen: Client, typed: Typed) -> None:
    header, *rows = typed("list", "sorter", "-c", "name,owner,trainer.lr,lora.target_modules,kl").splitlines()
    assert header.split("\t") == ["name", "owner", "trainer.lr", "lora.target_modules", "kl"]
    spec, (last,) = frozen.show("sorter").spec, frozen.steps("sorter", after=41)
    lr, kl = f"{spec['trainer']['lr']:.4g}", f"{last.metrics['kl']:.4g}"
    assert [row.split("\t") for row in rows] == [["sorter", "ann", lr, spec["lora"]["target_modules"], kl]]
    (run,) = typed("list", "sorter", "--columns", "seed,deterministic,reward.name", "--json")
    kept = {"seed": spec["seed"], "deterministic": spec["deterministic"], "reward.name": spec["reward"]}
    assert run["values"] == kept


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--state", "faild"), "failed"),
        (("--older", "7"), "7d"),
        (("--columns", "trainer.lrr"), "trainer.lr"),
        (("--columns", "name,rank"), "lora.rank"),
        (("--sort", "-rewrad"), "reward"),
        (("--columns", 'a."b'), "no key"),
        (("--columns", "entropi"), "Did you mean entropy?"),
        (("--columns", "tooke"), "Did you mean took"),
    ],
)
def test_a_word_that_means_nothing_is_refused(options: tuple[str, str], told: str, typed: Typed) -> None:
    with pytest.raises(SpecError) as raised:
        typed("list", *options)
    assert told in f"{raised.value.message} {raised.value.hint}"


def test_a_metric_of_other_runs_is_a_dash(frozen: Client, typed: Typed) -> None:
    rows = typed("list", "waits", "judge-fails", "-c", "name,loss,lora.adapter_path").splitlines()[1:]
    assert sorted(row.split("\t") for row in rows) == [["judge-fails", "-", "-"], ["waits", "-", "-"]]


def test_a_list_that_is_cut_says_so(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(typed("list", "--limit", "2", "--json")) == 2
    monkeypatch.setattr("lorad.cli.commands.list._SHOWN", 3)
    assert len(typed("list", "--sort", "name").splitlines()) == 1 + 3
    assert "--all" in typed.told  # type: ignore[attr-defined]
    assert len(typed("list", "--sort", "name", "--all").splitlines()) > 15


def test_a_sweep_folds_into_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    grid = [
        Run(
            f"g-{n}",
            "running",
            step=n,
            steps=10,
            sweep="g",
            reward=n / 10,
            owner="me",
            values={"trainer.lr": n},
        )
        for n in range(1, 6)
    ]
    ended = Run(
        "g-6", "ended", reason="failed", step=1, steps=10, sweep="g", owner="me", values={"trainer.lr": 1}
    )
    alone = Run("one", "queued", steps=4, owner="me", values={"trainer.lr": 7})
    listing.show([*grid, alone, ended], ["name", "state", "step", "reward", "trainer.lr", "owner"], fold=True)
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["g (6 runs)", "5 running, 1 failed", "16/60", "0.500", "1..5", "me"],
        ["one", "queued", "0/4", "", "7", "me"],
    ]


def test_a_narrow_list_keeps_the_eval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lorad.cli.table.terminal_width", lambda: 80)
    trained = Run("sorter-long-name-1", "ended", reason="completed", step=60, steps=60, reward=0.625)
    scored = replace(trained, eval_first=0.0, eval_last=0.625)
    likely = replace(trained, nll_first=2.1, nll_last=1.9)
    listing.show([scored, likely], [], fold=False)
    head, *rows = capsys.readouterr().out.splitlines()
    assert "age" not in head and "version" not in head
    assert "0.000 -> 0.625" in rows[0] and "nll 2.100 -> 1.900" in rows[1]


def test_several_need_a_yes_in_a_script(typed: Typed, frozen: Client) -> None:
    for words in (("waits*",), ("waits", "waits-too"), ("--state", "queued")):
        with pytest.raises(SpecError, match="nobody can be asked whether to stop 2 runs") as raised:
            typed("stop", *words)
        assert raised.value.exit_code == 2
    with pytest.raises(SpecError, match="no run was named"):
        typed("stop", "--yes")
    assert len(frozen.select(Selection(state=["queued"]))) == 2


def test_a_name_of_no_run_is_refused_first(typed: Typed, frozen: Client) -> None:
    with pytest.raises(NotFound, match="no run named nobody"):
        typed("stop", "waits", "nobody", "--yes")
    with pytest.raises(NotFound, match="like none-"):
        typed("stop", "none-*", "--yes")
    assert frozen.show("waits").state == "queued"
    typed("rm", "--state", "failed", "--older", "30d", "--yes")
    assert "nothing to delete" in typed.told  # type: ignore[attr-defined]


def test_a_question_lists_what_it_is_about(frozen: Client) -> None:
    environment = os.environ | {"LORAD_HOME": str(frozen.home.root)}
    lorad = str(Path(sys.executable).parent / "lorad")
    terminal = Terminal([lorad, "kill", "waits*", "sorter-hot"], 100, environment)
    seen = terminal.until("Kill 3 runs")
    assert all(name in seen for name in ("waits", "waits-too", "sorter-hot"))
    terminal.type("n\r")
    assert terminal.end()[1] != 0
    assert len(frozen.select(Selection(state=["queued"]))) == 2


def test_a_failure_keeps_none_of_the_others(typed: Typed, frozen: Client) -> None:
    done = typed("pause", "gsm8k-32k", "waits", "--yes", "--json")
    assert [one.get("state") for one in done] == ["paused", None]
    assert done[1]["error"]["kind"] == "Conflict" and typed.code == 1  # type: ignore[attr-defined]
    typed("resume", "waits", "sorter", "--yes")
    told, code = typed.told, typed.code  # type: ignore[attr-defined]
    assert (code, frozen.show("waits").state) == (1, "queued")
    assert "waits is queued." in told and "1 of 2 failed to resume." in told


def test_a_glob_leaves_out_what_does_not_fit(typed: Typed, frozen: Client) -> None:
    typed("pause", "waits*", "gsm8k-*", "--yes")
    assert "Left out: 1 run" in typed.told and typed.code == 0  # type: ignore[attr-defined]
    assert names(frozen.select(Selection(names=["waits*"], state=["paused"]))) == {"waits", "waits-too"}
    assert [one["reason"] for one in typed("stop", "waits*", "--json", "--yes")] == ["stopped", "stopped"]
    assert {one["name"] for one in typed("rm", "waits*", "--json", "--yes")} == {"waits", "waits-too"}
    assert frozen.select(Selection(names=["waits*"])) == []


def test_versions_are_named_by_steps_and_globs(typed: Typed, frozen: Client) -> None:
    there = [version for version in frozen.adapters("sorter") if version.path]
    step = there[-1].step
    assert frozen.pin(f"sorter@step:{step}").version == there[-1].version
    assert frozen.unpin("sorter@latest").version == frozen.show("sorter").version
    with pytest.raises(NotFound, match="no step 41000 of run sorter"):
        frozen.pin("sorter@step:41000")
    held = {version.version for version in there}
    pinned = typed("pin", "sorter@*", "--yes", "--json")
    assert {version["version"] for version in pinned} | {20} == held
    typed("unpin", "sort*@*", "--yes")
    assert not any(version.pinned for version in frozen.adapters("sorter"))


def test_one_run_is_named_and_not_asked_about(typed: Typed, frozen: Client) -> None:
    assert typed("stop", "summaries", "--json")["reason"] == "stopped"
    with pytest.raises(LoradError, match="no run named summaries-2"):
        typed("stop", "summaries-2")


def test_open_prints_the_directory_alone(typed: Typed, frozen: Client) -> None:
    assert typed("open", "sorter") == f"{frozen.show('sorter').directory}\n"


def test_two_runs_differ_by_keys_files_and_curves(typed: Typed, frozen: Client) -> None:
    found = typed("diff", "sorter", "one-answer", "--json")
    specs = [frozen.show(name).spec["trainer"]["steps"] for name in ("sorter", "one-answer")]
    assert found["spec"]["trainer.steps"] == specs and "name" not in found["spec"]
    point = found["curves"][-1]
    assert point["step"] == frozen.show("sorter").step  # the last that both have made
    (theirs,) = frozen.steps("one-answer", after=point["step"] - 1, limit=1)
    assert point["figures"]["reward"] == [frozen.show("sorter").reward, theirs.metrics["reward"]]
    assert found["curves"][0]["step"] == 0 and None not in found["curves"][0]["figures"]["eval"]
    assert typed("diff", "sorter", "sorter", "--json")["spec"] == {}
    assert "trainer.steps\t60\t200\n" in typed("diff", "sorter", "one-answer")


def test_a_run_at_work_is_refused_unasked(typed: Typed) -> None:
    with pytest.raises(Conflict, match="support-bot is running: only a run that is over can be deleted"):
        typed("rm", "support-bot")
