"""Chats of many turns: tokens and masks as if each turn were rendered behind all before it, for the cost of
the text.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.rl.completions import parts
from lorad.rl.completions.prefixes import Prefixes
from lorad.rl.completions.targets import TargetDataset
from lorad.rl.data import Example
from lorad.rl.tokenizer import Tokenizer
from tests.rl.test_chat_templates import TEMPLATES, write
from tests.rl.test_targets import CHAT, THOUGHT, chat_tokenizer, load

FAMILIES = ["chatml", "llama3", "gemma", "mistral", "gpt_oss", "qwen3"]
NUMBERED = (
    "{% for m in messages %}[{{ loop.index }}] {{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[{{ messages | length + 1 }}] assistant: {% endif %}"
)
WORDS = ["one", " two", "\n", "\n\n", "  ", "3", "é", "…", "</s>", "<|im_end|>", " \n ", "a"]


def chat(turns: int, seed: int = 0, system: bool = False) -> dict[str, Any]:
    of = random.Random(seed)
    said = ["".join(of.choices(WORDS, k=of.randint(1, 8))) + f" {place}" for place in range(2 * turns)]
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)
    ]
    return {"messages": [{"role": "system", "content": "Be brief."}] * system + messages}


def everything(data: TargetDataset) -> list[tuple[str, list[int], list[int], list[bool]]]:
    def said(one: Example) -> tuple[str, list[int], list[int], list[bool]]:
        (target,) = one.targets
        return one.prompt, list(one.tokens), target.tokens.tolist(), target.trained.tolist()

    return [said(one) for one in data.take(0, data.size or 0)]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_chats_are_what_prefixes_say(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(tmp_path, family)
    has_system = family not in ("gemma", "mistral")
    rows = [chat(turns, turns, system=has_system and turns == 10) for turns in (9, 10, 17)]
    if family in THOUGHT:
        rows.append({"messages": [*chat(9)["messages"], CHAT[0], THOUGHT[family], *chat(5)["messages"]]})
    found = everything(load(tokenizer, tmp_path, *rows, max_sample_tokens=100_000))
    monkeypatch.setattr(parts, "_FEW", 1000)
    assert found == everything(load(tokenizer, tmp_path, *rows, max_sample_tokens=100_000))


def test_a_template_that_counts_turns_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(write(tmp_path, NUMBERED))
    found = everything(load(tokenizer, tmp_path, chat(30), max_sample_tokens=100_000))
    monkeypatch.setattr(parts, "_FEW", 1000)
    assert found == everything(load(tokenizer, tmp_path, chat(30), max_sample_tokens=100_000))


class Counted(Tokenizer):
    """Counts what is rendered and tokenised."""

    messages = characters = 0

    def chats(self, chats: Sequence[Any], *others: Any, **how: Any) -> list[str]:
        self.messages += sum(map(len, chats))
        return super().chats(chats, *others, **how)

    def encode_batch(self, texts: Sequence[str], **how: Any) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_batch(texts, **how)


def cost(directory: Path, turns: int, **data: Any) -> tuple[int, int]:
    tokenizer = Counted(directory)
    load(tokenizer, directory, {"messages": [CHAT[0], THOUGHT["qwen3"]] * turns}, **data)
    return tokenizer.messages, tokenizer.characters


def test_a_chat_costs_what_it_says(tmp_path: Path) -> None:
    write(tmp_path, (TEMPLATES / "chatml.jinja").read_text())
    small, large = (cost(tmp_path, turns, max_sample_tokens=10**6) for turns in (100, 400))
    assert large[0] < 4.5 * small[0] and large[1] < 4.5 * small[1]


@pytest.mark.system
def test_a_rewritten_chat_costs_its_usable_turns(tmp_path: Path) -> None:
    write(tmp_path, (TEMPLATES / "qwen3.jinja").read_text())
    small, large = (cost(tmp_path, turns, max_sample_tokens=300) for turns in (100, 400))
    assert large[0] < 4.5 * small[0] and large[1] < 4.5 * small[1]


def test_turns_behind_too_long_prompts_are_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, (TEMPLATES / "qwen3.jinja").read_text()))
    data = load(tokenizer, tmp_path, {"messages": [CHAT[0], THOUGHT["qwen3"]] * 100}, max_sample_tokens=300)
    assert (data.size or 0) > 3 and data.dropped + (data.size or 0) == 100


@pytest.mark.parametrize("family", FAMILIES)
def test_beginnings_are_tokenised_as_alone(family: str, tmp_path: Path) -> None:
    tokenizer, of = chat_tokenizer(tmp_path, family), random.Random(1)
    marks = [*json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]]
    plain = [word for word in WORDS if not word.startswith("<")]
    for words, special in (
        (WORDS + [mark["content"] for mark in marks], False),
        (plain, False),
        (WORDS, True),
    ):
        prefixes = Prefixes(tokenizer, special=special)
        for _ in range(30):
            text = "".join(of.choices(words, k=40))
            ids = tokenizer.encode(text, special=special)
            ends = sorted(of.choices(range(1, len(text)), k=10))
            for end, (first, more) in zip(ends, prefixes.of(text, ids, ends), strict=True):
                assert ids[:first] + more == tokenizer.encode(text[:end], special=special)


def test_beginnings_cost_no_second_tokenisation(tmp_path: Path) -> None:
    write(tmp_path, (TEMPLATES / "chatml.jinja").read_text())
    tokenizer = Counted(tmp_path)
    for turn in ("<|im_start|>user\none two<|im_end|>\n", "User: one two\nBot: three\n"):
        text = turn * 1000
        ids = tokenizer.encode(text)
        before = tokenizer.characters
        Prefixes(tokenizer, special=False).of(text, ids, np.arange(100, len(text), 100).tolist())
        assert tokenizer.characters - before < 3 * len(text)
