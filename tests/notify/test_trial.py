"""`lorad notify test`, and who hears of runs whose spec names nobody."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorad.box.config import load
from lorad.cli.app import app
from lorad.errors import SpecError
from lorad.notify.deliver import refuse_unfit
from lorad.preflight.__main__ import own_or_usual
from lorad.spec.model import convert
from lorad.spec.notify import Notify


def test_trial_reaches_receivers_of_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAD_HOME", str(tmp_path))
    works, fails = f"{{command: [sh, -c, 'cat > {tmp_path}/got']}}", "{command: [sh, -c, exit 3]}"
    (tmp_path / "config.yaml").write_text(f"notify: [{works}, {fails}]")
    done = CliRunner().invoke(app, ["notify", "test", "--json"])
    assert [one["error"] for one in json.loads(done.stdout)] == ["", "it ended with code 3"]
    assert (done.exit_code, json.loads((tmp_path / "got").read_text())["event"]) == (1, "test")


def test_spec_goes_before_config(tmp_path: Path) -> None:
    usual = [Notify(command=["sh"])]
    check = partial(refuse_unfit, cwd=tmp_path)
    assert own_or_usual(None, usual, check) == usual
    assert own_or_usual([], usual, check) == []
    with pytest.raises(SpecError, match=r"config\.yaml"):
        own_or_usual(None, [Notify(command=["program-that-is-nowhere"])], check)


@pytest.mark.parametrize(
    "receiver",
    [
        {},
        {"command": ["x"], "url": "https://example.org"},
        {"command": ["x"], "form": "slack"},
        {"url": "https://hooks.slack.com/services/T/B/x"},
        {"url": "file:///etc/passwd"},
        {"url": "https://example.org", "events": []},
        {"command": "echo hi"},
    ],
)
def test_broken_receivers_are_refused(receiver: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="notify"):
        convert({"notify": [receiver]})
    (tmp_path / "config.yaml").write_text(json.dumps({"notify": [receiver]}))
    with pytest.raises(SpecError, match="notify"):
        load(tmp_path / "config.yaml")
