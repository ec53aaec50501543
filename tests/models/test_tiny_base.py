import json
import logging
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorad.rl.tasks import TASKS, problem

TINY = Path(str(files("lorad"))) / "models" / "tiny"
BASES = {"tiny": "Qwen3ForCausalLM", "tiny_moe": "Qwen3MoeForCausalLM"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.env is None])
def test_base_solves_some_held_out_problems(base: str, task: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY.parent / base)
    model = AutoModelForCausalLM.from_pretrained(TINY.parent / base, dtype="auto")
    problems = [problem(task, "test", 0, index) for index in range(128)]
    prompts = tokenizer(
        [p.prompt for p in problems], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    output = model.generate(**prompts, do_sample=False, max_new_tokens=16)[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(output)
    solved = [text.startswith(p.answer + "<eos>") for text, p in zip(texts, problems, strict=True)]
    assert 0.1 < sum(solved) / len(solved) < 0.4


@pytest.mark.parametrize("base", BASES)
def test_loading_the_base_warns_about_nothing(
    base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = AutoModelForCausalLM.from_pretrained(TINY.parent / base)
    AutoTokenizer.from_pretrained(TINY.parent / base)
    assert type(model).__name__ == BASES[base]
    assert not [record.message for record in caplog.records]


@pytest.mark.parametrize(
    "text", ["S:5172=", "  two  spaces ", "line one\n\nline 2", "Tom's $5.50 + 10% = ~{x|y}?", "a=>b[0]\\^`"]
)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_transformers_and_tokenizers_encode_alike(tokenizer: Tokenizer) -> None:
    text = "R:abc= x\n y"
    slow = AutoTokenizer.from_pretrained(TINY)
    assert slow(text)["input_ids"] == tokenizer.encode(text).ids
    assert slow.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_have_fixed_ids(tokenizer: Tokenizer) -> None:
    """Nothing is added to a prompt."""
    assert tokenizer.encode("<pad><eos><unk>").ids == [0, 1, 2]
    assert tokenizer.encode("é").ids == [2]
    assert AutoTokenizer.from_pretrained(TINY).bos_token is None


def test_the_directory_is_small() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 4_000_000


def test_sizes_are_even_and_vocabulary_is_padded() -> None:
    config = json.loads((TINY / "config.json").read_text())
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    assert all(config[size] % 2 == 0 for size in sizes)
    assert config["vocab_size"] % 64 == 0
    assert config["max_position_embeddings"] >= 1024


def test_float32_and_bfloat16_are_the_same_checkpoint() -> None:
    weights = load_file(TINY / "model.safetensors")
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())
