"""A folder in which recipes of tinker-cookbook run without the internet: data sets under their names on the
hub, and a small base that can learn what the recipes reward. `python -m tests.tinker.real.offline DIR`
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit.pool_kit import TINY

NAME = "Qwen/Qwen3.5-9B-Base"  # the cookbook knows it; for bases its renderer is role_colon
ANSWER = 3  # of every question
_ROWS = 512
_STEPS, _BATCH, _LR = 120, 4, 2e-3
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_SHOTS = "User: How many r's are in strawberry?"


def make(root: Path) -> Path:
    """Make the folder; returns the directory of the base."""
    rows = [{"question": f"What is {n}?", "answer": f"It is\n#### {ANSWER}"} for n in range(_ROWS)]
    _dataset(root / "openai" / "gsm8k", "main", train=rows, test=rows[:16])
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "3 3 3"}]}
        for n in range(_ROWS)
    ]
    _dataset(root / "HuggingFaceH4" / "no_robots", "default", train=chats, test=chats[:16])
    pairs = [
        {"chosen": f"\n\nHuman: {n}?\n\nAssistant: good", "rejected": f"\n\nHuman: {n}?\n\nAssistant: bad"}
        for n in range(_ROWS)
    ]
    _dataset(root / "Anthropic" / "hh-rlhf", "default", train=pairs, test=pairs[:16])
    return _base(root / NAME)


def _dataset(directory: Path, config: str, **splits: list[dict[str, Any]]) -> None:
    directory.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    (directory / "README.md").write_text(head)
    for split, rows in splits.items():
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _base(directory: Path) -> Path:
    """builtin:tiny, taught to answer by a random digit in a box: each is right now and then."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    for _ in range(_STEPS):
        ids, labels = _batch(tokenizer, rng)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _batch(tokenizer: Any, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [B, T], of dialogues whose answers alone are learnt."""
    rows = []
    for _ in range(_BATCH):
        before = f"{_SHOTS}{_SUFFIX}\n\nAssistant: We count. \\boxed{{3}}\n\n" * rng.randrange(2)
        prompt = tokenizer.encode(f"{before}User: What is {rng.randrange(_ROWS)}?{_SUFFIX}\n\nAssistant:")
        answer = tokenizer.encode(f" \\boxed{{{rng.randrange(10)}}}\n\nUser:")
        rows.append((prompt, answer))
    size = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.zeros((_BATCH, size), dtype=torch.long), torch.full((_BATCH, size), -100)
    for row, (prompt, answer) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer])
        ids[row, : whole.numel()] = whole
        labels[row, len(prompt) : whole.numel()] = torch.tensor(answer)
    return ids, labels


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
