"""A backend is named in `config.yaml`, whose other lines and comments stay."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.box.config import load
from lorad.box.config_edit import name_backend
from lorad.errors import SpecError

FILES = {
    "none": "",
    "comments alone": "# what holds here\n",
    "other keys": "idle_timeout: 30  # seconds\nprices: {gpu_hour: 2.5}\n",
    "no end of line": "# mine\nidle_timeout: .inf",
    "block": "backends:\n  # the servers\n  vllm:\n    python: /a/b  # old\n    env: {A: b}\nstorage: /x\n",
    "inner flow": "backends:\n    vllm: {python: '/a/b', env: {A: b}}  # old\n    # more\n    fsdp: {}\n",
    "no python": "storage: /x\nbackends:\n  vllm:\n    # of mine\n    env:\n      A: b\n\n# end\n",
    "flow without python": "backends:\n  vllm: {env: {A: b}}\n",
    "list at the margin": "backends:\n  fsdp: {python: /f}\nenvironment:\n- HF_HOME\n# end\n",
    "windows": "# mine\r\nbackends:\r\n  fsdp: {python: /f}\r\n",
    "anchor elsewhere": "storage: &s /x\nbackends:\n  fsdp: {python: /f}\n",
}
PATHS = st.one_of(
    st.sampled_from(["/opt/lorad/vllm-1/bin/python", "/with space/py", "/a: b #c/python", "/q'\"/p", "/ü/p"]),
    st.text("abz019 _-.:#'\"{}[],&*!|>%@`~\\ü", min_size=1).map(lambda text: f"/{text}x"),
)


def comments(text: str) -> set[str]:
    return {line.rpartition("#")[2].strip() for line in text.splitlines() if "#" in line}


def plain(text: str) -> dict[str, Any]:
    return yaml.safe_load(text) or {}


@settings(max_examples=80, deadline=None)
@given(
    text=st.sampled_from(sorted(FILES.values())),
    python=PATHS,
    kind=st.sampled_from(["vllm", "sglang"]),
    env=st.sampled_from([{}, {"PYTHONPATH": "/a b:/c"}, {"A": "c", "B": "{}"}]),
)
def test_naming_a_backend_changes_that_key_alone(
    text: str, python: str, kind: str, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("home") / "config.yaml"
    file.write_bytes(text.encode())
    assert name_backend(file, kind, Path(python), env)
    new = file.read_bytes().decode()
    backend = load(file).backends[kind]
    assert backend.python == Path(python) and backend.env.items() >= env.items()
    assert comments(text) <= comments(new)
    before = plain(text)
    entry = before.setdefault("backends", {}).setdefault(kind, {})
    entry["python"] = str(Path(python))
    if env:
        entry["env"] = entry.get("env", {}) | env
    assert plain(new) == before
    assert not name_backend(file, kind, Path(python), env) and file.read_bytes().decode() == new
    assert file.with_name("config.yaml.1").read_bytes().decode() == text


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{idle_timeout: 30}\n",
        "backends: {}\n",
        "backends: {sglang: {python: /x}}\n",
        "backends:\n  sglang: &a {python: /x}\n  vllm: *a\n",
        "backends:\n  vllm: {}\n",
        "idle_timeout: 30\n...\n",
    ],
)
def test_flow_style_and_anchors_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=r"where backends.vllm has to be written") as refused:
        name_backend(file, "vllm", Path("/new/bin/python"), {"A": "b"})
    by_hand = refused.value.hint.partition("\n")[2]
    assert plain(by_hand)["backends"]["vllm"] == {"python": "/new/bin/python", "env": {"A": "b"}}
    assert file.read_text() == text and [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("text", [b"backends: {vllm: {pyton: /x}}\n", b"storage: /\xff\n"])
def test_broken_config_is_left_as_it_is(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text)
    with pytest.raises(SpecError, match=r"pyton|not readable"):
        name_backend(file, "vllm", Path("/new"), {})
    assert file.read_bytes() == text


def test_link_and_mode_of_the_file_stay(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("backends:\n  vllm: # here\n    python: /a\n")
    real.chmod(0o640)
    link = tmp_path / "config.yaml"
    link.symlink_to(real)
    assert name_backend(link, "vllm", Path("/n"), {}, dry_run=True) and "/n" not in real.read_text()
    assert name_backend(link, "vllm", Path("/n"), {}) and "# here" in real.read_text()
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert name_backend(tmp_path / "new" / "config.yaml", "vllm", Path("/n"), {})
    assert load(tmp_path / "new" / "config.yaml").backends["vllm"].python == Path("/n")
