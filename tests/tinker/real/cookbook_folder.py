"""A folder in which recipes of tinker-cookbook run without the internet: `python -m
tests.tinker.real.cookbook_folder DIR`.

The recipes load their data sets by the names that those have on the hub, and `datasets` takes a folder of
such a name in the working directory instead. base/ is builtin:tiny, taught for a quarter of a minute to
answer questions of the recipes by \\boxed{} and one of four digits, of which one is right: reinforcement
learning then has something to find. digits.py is an environment of verifiers that asks them.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit.pool_kit import TINY

_RIGHT, _ANSWERS = "3", "1234"
_ROWS = 1024
_STEPS, _BATCH, _LR = 70, 4, 3e-3
_ASKED = (  # what rl_loop, and then math_rl, ask for behind each question
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
_SHOT = (  # the example that both show first
    "User: How many r's are in strawberry?{asked}\n\nAssistant: Let's spell the word out and number all the "
    "letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. "
    "\\boxed{{3}}\n\nUser: {question}{asked}\n\nAssistant:"
)

_DIGITS = """
import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def right(completion, answer, **_):
    return float(answer in completion[-1]["content"])


def load_environment():
    rows = [json.loads(line) for line in Path(__file__).with_suffix(".jsonl").read_text().splitlines()]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""


def make(root: Path) -> Path:
    """Make the folder; returns the directory of the base."""
    questions = [f"What is {n}?" for n in range(_ROWS)]
    said = [[{"role": "user", "content": q}, {"role": "assistant", "content": "3 2 1"}] for q in questions]
    begun = [f"\n\nHuman: {question}\n\nAssistant: " for question in questions]
    _dataset(root / "HuggingFaceH4" / "no_robots", "default", [{"messages": chat} for chat in said])
    _dataset(
        root / "openai" / "gsm8k", "main", [{"question": q, "answer": f"#### {_RIGHT}"} for q in questions]
    )
    pairs = [{"chosen": f"{text}good", "rejected": f"{text}bad"} for text in begun]
    _dataset(root / "Anthropic" / "hh-rlhf", "default", pairs)
    (root / "digits.py").write_text(_DIGITS)
    asked = [{"prompt": _chat(question), "answer": f"\\boxed{{{_RIGHT}}}"} for question in questions]
    (root / "digits.jsonl").write_text("\n".join(map(json.dumps, asked)))
    return _taught(root / "base")


def _chat(question: str) -> list[dict[str, str]]:
    """Return the messages of a dialogue up to its last answer."""
    parts = [part.split(": ", 1) for part in _SHOT.format(asked=_ASKED[0], question=question).split("\n\n")]
    return [{"role": part[0].lower(), "content": part[1]} for part in parts[:-1]]


def _dataset(directory: Path, config: str, rows: list[dict[str, Any]]) -> None:
    """Write a data set as the hub has them: a card that names the files of each split."""
    directory.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    (directory / "README.md").write_text(card)
    for split, some in (("train", rows), ("test", rows[:16])):
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, some)))


def _taught(directory: Path) -> Path:
    """Train builtin:tiny, whole, on dialogues of the recipes."""
    torch.manual_seed(0)
    chance = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    for step in range(_STEPS):
        ids, labels = _batch(tokenizer, chance)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = _LR * (1 - step / _STEPS)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _batch(tokenizer: Any, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [B, T], of dialogues whose last answers alone are learnt."""
    rows = []
    for _ in range(_BATCH):
        question = f"What is {chance.randrange(_ROWS)}?"
        prompt = tokenizer.encode(_SHOT.format(asked=chance.choice(_ASKED), question=question))
        rows.append((prompt, tokenizer.encode(f" \\boxed{{{chance.choice(_ANSWERS)}}}\n\nUser:")))
    size = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.zeros((_BATCH, size), dtype=torch.long), torch.full((_BATCH, size), -100)
    for row, (prompt, answer) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer])
        ids[row, : whole.numel()] = whole
        labels[row, len(prompt) : whole.numel()] = torch.tensor(answer)
    return ids, labels


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
