"""GSM8K (Cobbe et al., 2021) as the recipes here read it.

`python examples/gsm8k.py [DIR]` writes train.jsonl and test.jsonl. The question is followed by how to answer,
since the reward looks for the number behind `####`; `solution` is what SFT learns to write. It needs
`datasets`: pip install 'lorad[hub]'. `--from FOLDER` takes train.jsonl and test.jsonl as the paper's authors
published them instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

HOW = 'Let\'s think step by step and output the final answer after "####".'  # SkyRL's words for it
DEFAULT = "~/data/gsm8k"  # where the recipes look


def rows(problems: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """As `data.prompt_key` and `data.answer_key` have them by default; the answer is the number alone."""
    for problem in problems:
        number = problem["answer"].rpartition("####")[2].strip()
        yield {
            "prompt": f"{problem['question']} {HOW}",
            "answer": number,
            "solution": problem["answer"],
        }


def problems_of(split: str, folder: str | None) -> Iterable[dict[str, str]]:
    """Read the problems of a split from the hub, or from the file of that name."""
    if folder is not None:
        return map(json.loads, (Path(folder) / f"{split}.jsonl").read_text().splitlines())
    import datasets

    return datasets.load_dataset("openai/gsm8k", "main", split=split)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", nargs="?", default=DEFAULT)
    parser.add_argument(
        "--from", dest="folder", help="a folder with train.jsonl and test.jsonl, as published"
    )
    options = parser.parse_args()
    path = Path(options.directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = (json.dumps(row) + "\n" for row in rows(problems_of(split, options.folder)))
        (path / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
