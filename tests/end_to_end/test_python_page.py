"""The Python blocks of docs/python.md do what the page says, one after the other, against a real daemon."""

import ast
import asyncio
import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.kit.world import REPOSITORY, world

pytestmark = pytest.mark.system

PAGE = (REPOSITORY / "docs" / "python.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
SPEC = """
algorithm: {group_size: 4}
data: {train: sort, eval: sort, prompts_per_step: 2}
trainer: {steps: 6}
rollout: {max_new_tokens: 6}
eval: {every: 3, problems: 4}
checkpoint: {every: 2}
"""


class Block(NamedTuple):
    """A block, and what the page shows below it."""

    line: int
    code: str
    prints: str


def blocks() -> Iterator[Block]:
    for found in BLOCK.finditer(PAGE):
        yield Block(PAGE[: found.start()].count("\n") + 2, found[1], found[2] or "")


async def printed(block: Block, names: dict[str, Any]) -> str:
    """Run a block as Jupyter does, with `await` at its top, and return what it printed."""
    padded = "\n" * (block.line - 1) + block.code
    code = compile(padded, "docs/python.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, names)  # noqa: S307
        else:
            await asyncio.to_thread(exec, code, names)
    return out.getvalue()


def pattern(text: str) -> str:
    """Make the pattern of what is printed; … stands for anything."""
    return ".*".join(re.escape(part) for part in text.split("…"))


async def test_blocks_of_the_page_print_that(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    with world() as made:
        monkeypatch.setenv("LORAD_HOME", str(made.home.root))
        monkeypatch.chdir(made.root)
        made.spec(SPEC, "run.yaml")
        names: dict[str, Any] = {}
        for block in blocks():
            said = await printed(block, names)
            assert re.fullmatch(pattern(block.prints), said, re.DOTALL), f"line {block.line}: {said}"


def test_every_text_belongs_to_a_block() -> None:
    assert len([block for block in blocks() if block.prints]) == PAGE.count("```text") > 8
