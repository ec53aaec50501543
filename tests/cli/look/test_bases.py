"""`lorad models`: which bases are here, who takes them, and whether they fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorad.backends.takers import takers
from lorad.box import gpus, machine
from lorad.box.gpus import Gpu
from lorad.cli.app import app
from lorad.models.directory import BUILTIN

TINY = BUILTIN["builtin:tiny"]
ALL = ["builtin", "fsdp", "megatron"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a base in its folder, one in config.yaml, and one and a half in the hub cache."""
    monkeypatch.setenv("LORAD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    shutil.copytree(TINY, tmp_path / "home" / "models" / "smollm2")
    shutil.copytree(TINY, tmp_path / "home" / "models" / "other")
    shutil.copytree(TINY, tmp_path / "named")
    for name, commit in (("whole", "1" * 40), ("half", "2" * 40)):
        kept = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(TINY, kept / "snapshots" / commit)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(commit)
    (tmp_path / "hub" / "models--org--half" / "snapshots" / ("2" * 40) / "model.safetensors").unlink()
    config = f"tinker: {{bases: {{Org/Named: {tmp_path / 'named'}}}}}\n"
    (tmp_path / "home" / "config.yaml").write_text(config)
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    app(["models", "--json"], standalone_mode=False)
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_bases_of_the_machine_are_listed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    found = {name: row["source"] for name, row in rows.items()}
    other = str(home / "home" / "models" / "other")
    assert found == {
        other: "home",
        "builtin:tiny": "lorad",
        "builtin:tiny-moe": "lorad",
        "org/whole": "hub",
        str(home / "named"): "config",
        "smollm2": "home",
    }
    own = rows["smollm2"]
    assert (own["trainers"], own["dtype"], own["fits"]) == (ALL, "float32", True)
    assert "vllm" in own["engines"] and ["fsdp", "sglang"] in own["pairs"]


def test_what_fits_is_said_of_weights(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = takers(TINY, "cpu").weights
    monkeypatch.setattr(machine, "available_memory", lambda: weights)
    assert not listed(capsys)["smollm2"]["fits"]
    small = [Gpu(number, "small", weights // 2, f"GPU-{number}", False) for number in range(4)]
    monkeypatch.setattr(gpus, "visible_gpus", lambda: small)
    assert listed(capsys)["smollm2"]["devices"] == 3
    monkeypatch.setattr(gpus, "visible_gpus", lambda: small[:2])
    assert not listed(capsys)["smollm2"]["fits"]


def test_a_broken_base_says_why(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "home" / "models" / "smollm2" / "config.json").unlink()
    app(["models"], standalone_mode=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("smollm2")]
    assert "config.json" in line


def test_a_foreign_architecture_has_fewer_takers(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": ["OtherForCausalLM"], "model_type": "other"}
    (base / "config.json").write_text(json.dumps(config))
    judged = takers(base, "cpu")
    assert "builtin" not in judged.engines and "fsdp" in judged.trainers
    assert ("builtin", "builtin") not in judged.pairs and not judged.problem
