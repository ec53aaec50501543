"""A backend is named in `config.yaml`, whose other lines and comments stay."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.box.config import load
from lorad.box.config_edit import change_backend
from lorad.errors import SpecError

FILES = {
    "none": "",
    "comments alone": "# what holds here\n",
    "other keys": "idle_timeout: 30  # seconds\nprices: {gpu_hour: 2.5}\n",
    "no end of line": "# mine\nidle_timeout: 30",
    "block": "backends:\n  # the servers\n  vllm:\n    python: /a/b  # old\n    env: {A: b}\nstorage: /x\n",
    "inner flow": "backends:\n    vllm: {python: '/a/b', env: {A: b}}  # old\n    # more\n    fsdp: {}\n",
    "no python": "storage: /x\nbackends:\n  vllm:\n    # of mine\n    env:\n      A: b\n\n# end\n",
    "list at the margin": "backends:\n  fsdp: {python: /f}\nenvironment:\n- HF_HOME\n# end\n",
    "windows": "# mine\r\nbackends:\r\n  fsdp: {python: /f}\r\n",
}
PATHS = st.one_of(
    st.sampled_from(["/opt/lorad/vllm-1/bin/python", "/with space/py", "/a: b #c/python", "/q'\"/p", "/ü/p"]),
    st.text("abz019 _-.:#'\"{}[],&*!|>%@`~\\ü", min_size=1).map(lambda text: f"/{text}x"),
)


def comments(text: str) -> set[str]:
    return {line.partition("#")[2].strip() for line in text.splitlines() if "#" in line}


def plain(text: str) -> dict[str, Any]:
    return yaml.safe_load(text) or {}


@settings(max_examples=60, deadline=None)
@given(text=st.sampled_from(sorted(FILES.values())), python=PATHS, kind=st.sampled_from(["vllm", "sglang"]))
def test_naming_a_backend_changes_that_key_alone(
    text: str, python: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("home") / "config.yaml"
    file.write_bytes(text.encode())
    assert change_backend(file, kind, python)
    new = file.read_bytes().decode()
    assert load(file).backends[kind].python == Path(python)
    assert comments(text) <= comments(new)
    before = plain(text)
    after = plain(new)
    entry = before.setdefault("backends", {}).setdefault(kind, {})
    entry["python"] = python
    assert after == before
    assert not change_backend(file, kind, python) and file.read_bytes().decode() == new
    assert not text or (file.with_name("config.yaml.1").read_bytes().decode() == text)


@pytest.mark.parametrize("name", ["block", "inner flow", "no python", "list at the margin"])
def test_forgetting_a_backend_leaves_the_others(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(FILES[name])
    gone = "fsdp" if name == "list at the margin" else "vllm"
    before = plain(FILES[name])
    assert change_backend(file, gone, None)
    del before["backends"][gone]
    assert plain(file.read_text()) == {key: value for key, value in before.items() if value}
    assert not change_backend(file, gone, None)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{idle_timeout: 30}\n",
        "backends: {vllm: {env: {A: b}}}\n",
        "backends: {}\n",
        "backends:\n  sglang: &a {python: /x}\n  vllm: *a\n",
        "storage: &s /x\n",
        "backends:\n  vllm: {env: {A: b}}\n",
    ],
)
def test_flow_style_and_anchors_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=r"backends.vllm cannot be changed") as refused:
        change_backend(file, "vllm", "/new/bin/python")
    assert "{python: /new/bin/python} as vllm below backends" in refused.value.hint
    assert file.read_text() == text and [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_broken_config_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("backends: {vllm: {pyton: /x}}\n")
    with pytest.raises(SpecError, match="pyton"):
        change_backend(file, "vllm", "/new")
    assert file.read_text() == "backends: {vllm: {pyton: /x}}\n"


def test_environment_is_added_and_mode_kept(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("backends:\n  vllm: # here\n    python: /a\n")
    real.chmod(0o640)
    link = tmp_path / "config.yaml"
    link.symlink_to(real)
    env = {"PYTHONPATH": "/a b:/c"}
    assert change_backend(link, "vllm", "/n", env, dry_run=True) and "/n" not in real.read_text()
    assert change_backend(link, "vllm", "/n", env)
    assert load(link).backends["vllm"].env == env and "# here" in real.read_text()
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert not change_backend(link, "vllm", "/n", env)
    assert change_backend(tmp_path / "new" / "config.yaml", "vllm", "/n", env)
    assert json.loads(json.dumps(plain((tmp_path / "new" / "config.yaml").read_text())))["backends"]["vllm"]
