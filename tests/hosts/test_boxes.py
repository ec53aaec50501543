"""Commands with --host are about the daemon of another box, and about nothing here.

The cases with a real sshd have mark.system, or mark.long.
"""

import getpass
import json
import subprocess
from pathlib import Path

import pytest

from lorad.adapters.directory import verify
from tests.hosts.conftest import BY_FAKE, REAL, Box

SPEC = """
algorithm: {group_size: 4}
data: {train: sort, prompts_per_step: 2}
trainer: {steps: 2}
rollout: {max_new_tokens: 8}
eval: {every: 0}
"""


@pytest.fixture(scope="module")
def run(box: Box) -> str:
    """A run that was started from here and is over there."""
    (box.here / "work/spec.yaml").write_text(SPEC)
    box.there("run", "spec.yaml", "--name", "far", "--wait")
    return "far"


@pytest.mark.system
@REAL
def test_commands_ask_the_other_box(box: Box, run: str) -> None:
    (listed,) = json.loads(box.there("list", "--json").stdout)
    assert (listed["name"], listed["state"]) == ("far", "ended")
    assert box.there("open", run).stdout.strip() == f"box:{box.far.home.run(run).root}"
    status = json.loads(box.lorad("daemon", "status", "--json", LORAD_HOST="h2").stdout)
    assert status["home"] == str(box.far.home.root)
    assert box.stopped_daemons()


def test_an_open_line_starts_no_ssh(box: Box) -> None:
    box.there("list")
    before = box.ssh_calls
    for words in (("list",), ("pools",), ("top",), ("devices", "--json")):
        box.there(*words)
    assert box.ssh_calls == before


@pytest.mark.system
@BY_FAKE
def test_all_boxes_are_listed_at_once(box: Box, run: str) -> None:
    box.add("gone", home="/nowhere", lorad="/nowhere/lorad")
    listed = box.lorad("--host", "all", "list")
    assert f"h2/{run}" in listed.stdout and "gone: /nowhere/lorad is not found on gone" in listed.stderr
    told = json.loads(box.lorad("list", "--json", LORAD_HOST="all").stdout)
    assert [row["name"] for row in told["boxes"]["h2"]] == [run] and list(told["errors"]) == ["gone"]
    assert "is for `lorad list`" in box.lorad("--host", "all", "show", run, expect=2).stderr
    box.lorad("hosts", "rm", "gone")


def test_the_daemon_sees_who_logged_in(box: Box, run: str) -> None:
    shown = json.loads(box.there("show", run, "--json").stdout)
    assert shown["owner"] == getpass.getuser()


def test_an_export_lands_here(box: Box, run: str) -> None:
    target = box.here / "work/adapter"
    answer = json.loads(box.there("export", f"{run}@1", "adapter", "--no-tokenizer", "--json").stdout)
    assert (answer["version"], answer["path"]) == (f"{run}@1", str(target))
    verify(target)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in target.iterdir()}
    box.there("export", f"{run}@1", "adapter", expect=1)
    box.there("export", f"{run}@9", "other", expect=3)
    assert not (box.here / "work/other").exists()
    assert not list(box.here.glob("work/.tmp-*"))


@BY_FAKE
def test_figures_land_here(box: Box, run: str) -> None:
    box.there("metrics", run, "--parquet", "figures.parquet")
    box.there("plot", run, "-o", "curves.svg")
    assert (box.here / "work/figures.parquet").exists() and (box.here / "work/curves.svg").exists()


@BY_FAKE
def test_files_of_here_are_refused_by_name(box: Box) -> None:
    work = box.here / "work"
    (work / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (work / "rows.yaml").write_text(SPEC.replace("train: sort", "train: rows.jsonl"))
    (work / "plain.yaml").write_text(SPEC)
    for words in (("rows.yaml",), ("plain.yaml", "data.train=rows.jsonl")):
        refused = box.there("check", *words, expect=2)
        assert "rows.jsonl is a file of this machine" in refused.stderr and "--cwd" in refused.stderr


@BY_FAKE
def test_relative_paths_begin_at_cwd_there(box: Box) -> None:
    (box.far.root / "far_rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 4)
    (box.here / "work/far.yaml").write_text(SPEC.replace("train: sort", "train: far_rows.jsonl"))
    missing = box.there("check", "far.yaml", expect=2)
    assert "far_rows.jsonl" in missing.stderr
    box.lorad("--host", "h2", "--cwd", box.far.root, "check", "far.yaml")


@BY_FAKE
def test_a_home_contradicts_a_host(box: Box) -> None:
    refused = box.lorad("--host", "h2", "list", expect=2, LORAD_HOME=str(box.here / "own"))
    assert "Unset LORAD_HOME" in refused.stderr and not (box.here / "own").exists()


@BY_FAKE
def test_python_asks_the_other_box(box: Box, run: str) -> None:
    code = f"import lorad; box = lorad.connect('h2'); print(box, box.get({run!r}).state)"
    done = subprocess.run(
        [*box.far.python, "-c", code], env=box.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["<Lorad", "h2>", "ended"]


@BY_FAKE
def test_two_boxes_stay_apart(box: Box, run: str, tmp_path: Path) -> None:
    box.add("h3", home=str(box.far.root / "third"))
    unreached = box.lorad("--host", "h3", "list", expect=5)
    assert "`lorad --host h3 daemon start`" in unreached.stderr
    box.lorad("--host", "h3", "daemon", "start")
    assert json.loads(box.lorad("--host", "h3", "list", "--json").stdout) == []
    assert [row["name"] for row in json.loads(box.there("list", "--json").stdout)] == [run]
    box.lorad("--host", "h3", "daemon", "stop")
    box.lorad("hosts", "rm", "h3")
    assert set(json.loads(box.lorad("hosts", "--json").stdout)["hosts"]) == {"h2"}
