"""docs/data.md: lorad reads each row of its tables as the page says."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.preflight.__main__ import preflight
from lorad.preflight.rows import check_rows
from lorad.rl.completions.targets import load_held_out, load_train
from lorad.rl.data import Example
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import convert
from lorad.spec.text import load_spec, mapping
from tests.driver.sampling.test_sources import home as home
from tests.kit.world import REPOSITORY

PAGE = (REPOSITORY / "docs" / "data.md").read_text()
TEMPLATE = (
    "{% for tool in tools or [] %}[tools]{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CELLS = [
    [cell.strip() for cell in line[1:-1].split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| .* \| `\{", line)
]
CASES = {f"{number} {cells[0]}": cells[1:] for number, cells in enumerate(CELLS)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes what the page shows, and ends turns of the assistant's."""
    directory = tmp_path_factory.mktemp("model") / "base"
    shutil.copytree(resolve("builtin:tiny"), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Iterator[Tokenizer]:
    made = Tokenizer(base)
    yield made
    made.close()


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def spec_of(cell: str, base: Path) -> dict[str, Any]:
    spec = mapping("\n".join(spans(cell)))
    return spec | {"model": {"path": str(base)}, "data": {"train": "rows.jsonl"} | spec.get("data", {})}


def read(example: Example, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the page may say of a row."""
    trained = [
        text
        for target in example.targets
        for text in tokenizer.decode(
            [token if kept else 0 for token, kept in zip(target.tokens, target.trained, strict=True)],
            skip_special=False,
        ).split("<eos>")
    ]
    return {
        "prompt": example.prompt,
        "answer": example.answer,
        "columns": example.row,
        "trained": [text.replace("<pad>", "") for text in trained if text.replace("<pad>", "")],
    }


@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_as_the_page_says(case: str, base: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows, settings, says = CASES[case]
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in spans(rows)))
    (tmp_path / "reward.py").write_text(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.M)[0])
    (claim, *quoted), given = spans(says), spec_of(settings, base)
    spec = convert(given)
    try:
        warnings = preflight(spec, cwd=tmp_path).warnings if "reward" in given else []
        data, held_out = load_train(spec, tokenizer, tmp_path), load_held_out(spec, tokenizer, tmp_path)
        warnings = warnings or check_rows(spec, data, held_out, tokenizer, is_scored=True)
    except SpecError as error:
        assert says.startswith("refused")
        assert error.in_full.replace(f"{tmp_path}/", "") == claim
        return
    assert not says.startswith("refused")
    expected = json.loads(claim) if claim.startswith("{") else {}
    found = read(data.take(0, 1)[0], tokenizer)
    assert {key: found[key] for key in expected} == expected
    doubts = [text for text in warnings if ": row " in text]
    assert doubts == (quoted if expected else [claim])


def test_the_page_has_each_form(tmp_path: Path) -> None:
    forms = {name for cells in CELLS for name in re.split(r", | the ", cells[0])}
    assert {"TRL", "verl", "SkyRL", "OpenAI", "ShareGPT", "Alpaca", "OpenRLHF", "ms-swift"} <= forms
    assert len(CELLS) > 60


def test_the_example_of_judged_sources_passes(home: Path) -> None:
    _, _, section = PAGE.partition("## Sources that are judged by")
    spec = load_spec(section.partition("```yaml")[2].partition("```")[0])
    assert preflight(spec, cwd=home).dataset_size == 18
    assert [label for _, label in spec.of_sources] == ["sums.jsonl", "store.jsonl", "store.jsonl"]
