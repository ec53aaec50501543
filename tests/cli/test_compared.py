"""What `lorad diff` calls different: values on the way to the newest ones, and files by their bytes."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from lorad.cli.commands.show import _spec_lines
from lorad.cli.compared import _show, compared
from lorad.records.runs import Attempt, Beginning, RunDetails
from lorad.spec.model import Spec, to_json
from lorad.spec.text import override as with_overrides


def a_run(name: str, *attempts: Attempt, lr: float = 0.1, begun: Beginning | None = None) -> RunDetails:
    spec = {"trainer": {"lr": lr}, "data": {"train": f"{name}.jsonl"}}
    return RunDetails(name, "ended", steps=6, spec=spec, attempts=[*attempts], begun=begun)


def resumed(attempt: int, step: int, lr: float, before: float) -> Attempt:
    changed: list[dict[str, Any]] = [{"trainer.lr": lr}, {"trainer.lr": before}]
    return Attempt(attempt, resumed_from=step, changed=changed[0], before=changed[1])


def test_a_rate_changed_on_the_way_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    there_and_back = Attempt(1), resumed(2, 2, 0.3, 0.1), resumed(3, 4, 0.1, 0.3)
    first, second = a_run("a"), a_run("b", *there_and_back)
    found = compared((first, second), [])
    assert "trainer.lr" not in found.spec and "trainer.lr" not in found.same["spec"]
    _show(found, first, second)
    assert "trainer.lr\t0.1\t0.1, 0.3 after step 2, 0.1 after step 4\n" in capsys.readouterr().out


REWARDS = "reward={name: regex, pattern: '[0-9]+'}", "reward=[exact_match, {name: regex, pattern: 'a'}]"


@pytest.mark.parametrize("override", REWARDS)
def test_a_reward_is_shown_as_written(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = json.loads(to_json(with_overrides(Spec(), [override])))
    (line,) = [one for one in _spec_lines(spec) if one.startswith("reward=")]
    assert "weight" not in line and '{"name": "regex", "pattern": "' in line
    assert json.loads(to_json(with_overrides(Spec(), [line]))) == spec
    other = a_run("b")
    _show(compared((replace(other, spec=spec), other), []), other, other)
    assert "max_failures" not in capsys.readouterr().out


def test_what_a_resume_rewound_is_left_out() -> None:
    rewound = Attempt(1), resumed(2, 4, 0.3, 0.1), resumed(3, 2, 0.1, 0.3)
    assert compared((a_run("a"), a_run("b", *rewound)), []).changed == {}


def test_equal_files_are_the_same_whatever_their_rows(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        a_run(name, begun=Beginning(1, data_sha256=name, inputs={"data.train": "5e"})) for name in ("a", "b")
    )
    found = compared((first, second), [])
    assert found.inputs == {} and found.same["inputs"] == ["data.train"]
    _show(found, first, second)
    assert "data.train (equal bytes)\ta.jsonl\tb.jsonl" in capsys.readouterr().out


def test_files_that_nobody_hashed_are_compared_by_rows() -> None:
    old = a_run("a", begun=Beginning(1, data_sha256="aa"))
    new = a_run("b", begun=Beginning(1, data_sha256="aa", inputs={"data.train": "5e"}))
    found = compared((old, new), [])
    assert found.inputs == {} and found.same["inputs"] == ["data"]
