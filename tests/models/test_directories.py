"""Where a model is, and whether it is whole: local directories, the hub cache, the hub."""

from pathlib import Path

import pytest
import torch

from lorad.errors import SpecError
from lorad.models.directory import read_config, resolve, weight_files
from lorad.models.loading import load_base
from tests.kit.fakes.foreign_models import make_moe
from tests.models.test_models import CPU, make_model


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, shard="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(SpecError, match=lost.name):
        read_config(tmp_path)


def test_missing_config_or_torn_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.json"):
        read_config(tmp_path)
    make_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SpecError, match=r"model\.safetensors"):
        load_base(tmp_path, torch.float32, CPU)


def test_paths_resolve_to_directories_or_say_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("builtin:tiny").name == "tiny"
    for path, named in (("builtin:huge", "builtin:tiny"), (str(tmp_path / "none"), "directory")):
        with pytest.raises(SpecError) as caught:
            resolve(path)
        assert named in f"{caught.value} {caught.value.hint}"


def test_hub_id_without_network_gives_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match=r"no-such-org/no-such-model .*hub cache") as caught:
        resolve("no-such-org/no-such-model")
    assert (
        "local directory" in caught.value.hint
        and "hf download no-such-org/no-such-model" in caught.value.hint
    )


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(root: Path, monkeypatch: pytest.MonkeyPatch, **refs: str) -> Path:
    """A snapshot of org/name as huggingface_hub lays it out: files are links to blobs, branches name a
    commit.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    repo, blobs = root / "models--org--name", root / "models--org--name" / "blobs"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    make_model(blobs, shard="20KB")
    (blobs / "tokenizer.json").write_text("{}")
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    for ref, commit in refs.items():
        (repo / "refs" / ref).write_text(commit)
    return snapshot


def test_a_cached_snapshot_is_found_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_cache(tmp_path, monkeypatch, main=COMMIT, v1=COMMIT)
    for path in ("org/name", "org/name@v1", f"org/name@{COMMIT}"):
        assert resolve(path) == snapshot
    assert load_base(snapshot, torch.float32, CPU).config == read_config(snapshot)
    with pytest.raises(SpecError, match="org/name@v2"):
        resolve("org/name@v2")


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model-00002-of-*.safetensors"])
def test_torn_snapshot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    snapshot = make_cache(tmp_path, monkeypatch, main=COMMIT)
    next(snapshot.glob(lost)).unlink()
    with pytest.raises(SpecError, match="not whole in the hub cache"):
        resolve("org/name")


def test_single_file_wins_over_a_stale_index(tmp_path: Path) -> None:
    make_model(tmp_path, shard="20KB")
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    make_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("any_architecture", [False, True])
def test_only_supported_architectures_are_downloaded(
    any_architecture: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_moe(tmp_path)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    if any_architecture:
        assert resolve("org/moe", any_architecture=True) == tmp_path
        return
    with pytest.raises(SpecError, match="does not know the architecture"):
        resolve("org/moe")
