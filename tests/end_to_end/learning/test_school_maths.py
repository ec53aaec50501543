"""Rows in the format of GSM8K through SFT and then GRPO, on a model with its own tokenizer and chat template:
the layers of builtin:tiny behind a byte-level BPE vocabulary.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lorad.models.directory import resolve
from tests.kit.world import World, world

VOCAB = 256
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SFT = """
algorithm: sft
lora: {rank: 32, alpha: 64}
data:
  train: chats.jsonl
  eval: test.jsonl
  prompt_key: question
  completion_key: answer
  prompts_per_step: 32
reward: gsm8k
rollout: {max_new_tokens: 32}
eval: {every: 100, problems: 64}
checkpoint: {every: 100}
trainer: {lr: 2.0e-3, steps: 30}
"""
STAGES = (("tuned", 0), ("tuned", -1), ("rl", -1))  # run and place of an eval


def problem(number: int) -> dict[str, str]:
    """A row of GSM8K's columns, whose answer ends with `#### N`."""
    rng = random.Random(number)
    who, what = rng.choice(("Tom", "Ann", "Bob", "Eva")), rng.choice(("apples", "pens", "coins"))
    a, b = rng.randrange(1, 6), rng.randrange(1, 5)
    question = f"{who} has {a} {what} and buys {b} more. How many {what} does {who} have?"
    return {"question": question, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}


def write(file: Path, rows: Sequence[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(directory: Path, texts: Sequence[str]) -> None:
    """Digits have the embeddings of builtin:tiny, other tokens random ones."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[*SPECIAL], show_progress=False)
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    tiny = resolve("builtin:tiny")
    old, weights = Tokenizer.from_file(str(tiny / "tokenizer.json")), load_file(tiny / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    made = np.random.default_rng(0).normal(0, embedding.std(), (VOCAB, embedding.shape[1]))
    for token in range(len(SPECIAL), tokenizer.get_vocab_size()):
        if (text := tokenizer.decode([token])).isdigit():
            made[token] = embedding[old.encode(text).ids[0]]
    weights["model.embed_tokens.weight"] = made.astype(np.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny / "config.json").read_text())
    config |= {"vocab_size": VOCAB, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as it:
        rows = [problem(number) for number in range(2000)]
        there = {row["question"] for row in rows[:64]}
        train = [row for row in rows[64:] if row["question"] not in there]
        chats = [
            [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]
            for r in train
        ]
        write(it.root / "chats.jsonl", [{"messages": chat} for chat in chats])
        write(it.root / "train.jsonl", train)
        write(it.root / "test.jsonl", rows[:64])
        texts = [text for row in train for text in row.values()]
        make_model(it.root / "model", ["user\nassistant\n", *texts])
        yield it


@pytest.mark.long
def test_sft_then_grpo_raise_the_reward(made: World) -> None:
    tuned = made.run("tuned", f"model.path={made.root / 'model'}", text=SFT)
    made.lorad(
        *("fork", f"tuned@{tuned.version}", "algorithm={name: grpo, group_size: 8, kl: {coef: 0.02}}"),
        *("data.train=train.jsonl", "data.completion_key=completion", "trainer.lr=1e-4"),
        *("--steps", 20, "--name", "rl", "--wait"),
    )
    base, told, after = (made.client.evals(run)[place].score or 0.0 for run, place in STAGES)
    assert base == 0 and told > 0.5 and after > told
