"""GSM8K (Cobbe et al., 2021) as the recipes here read it.

`python examples/gsm8k.py [DIR]` writes train.jsonl and test.jsonl. The question is followed by how to answer,
since the reward looks for the number behind `####`. It needs `datasets`: pip install 'lorad[hub]'.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HOW = 'Let\'s think step by step and output the final answer after "####".'  # SkyRL's words for it
DEFAULT = "~/data/gsm8k"  # where the recipes look


def rows(problems: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """As `data.prompt_key` and `data.answer_key` have them by default; the answer is the number alone."""
    for problem in problems:
        number = problem["answer"].rpartition("####")[2].strip()
        yield {"prompt": f"{problem['question']} {HOW}", "answer": number}


def main(directory: str = DEFAULT) -> None:
    import datasets

    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = (
            json.dumps(row) + "\n" for row in rows(datasets.load_dataset("openai/gsm8k", "main", split=split))
        )
        (path / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
