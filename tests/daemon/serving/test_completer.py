"""The process that asks a pool for completions: the daemon itself opens no tokenizer."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.bounds import COMPLETIONS, JSON_BYTES
from lorad.daemon.serving.asking import AnswerLine, PoolQuestion
from lorad.errors import PoolLost, SpecError
from lorad.models.directory import BUILTIN
from lorad.protocol.calls import LoadVersion
from lorad.records.requests import GenerateRequest, Sampling
from tests.kit.daemon_world import finished, serving
from tests.kit.warm.processes import python

TINY = BUILTIN["builtin:tiny"]


def said(model: Path, **body: Any) -> AnswerLine:
    """Return the last line, of a process that is told of a pool that is not there."""
    asked = PoolQuestion(
        "/none", str(model), LoadVersion("a@1", "/none", ""), None, GenerateRequest("a@1", **body)
    )
    command = [*python(), "-m", "lorad.daemon.serving.completer"]
    done = subprocess.run(command, input=msgspec.json.encode(asked), capture_output=True, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=AnswerLine)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompts": [[2**31 - 1]]}, "token 2147483647, which the model does not know"),
        ({"prompts": [[]]}, "the prompt is empty"),
        ({"prompt": "1" * 10_000}, "exceed the 2048 positions"),
        ({"prompt": "1" * 3_000_000}, "of 3000000 characters exceeds"),
        ({"prompts": [[5]], "seeds": [[2**64]]}, "more than 64 bits"),
        ({"prompts": [[5]], "seeds": [[1], [2]]}, "are not 1 of each prompt"),
    ],
    ids=["token", "empty", "long", "longest", "seed", "seeds"],
)
def test_what_no_pool_can_take_is_refused(body: dict[str, Any], says: str) -> None:
    error = said(TINY, **body).error
    assert error is not None and error.kind == "SpecError" and says in error.message


def test_enormous_tokenizer_is_not_read(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    os.truncate(tmp_path / "tokenizer.json", JSON_BYTES + 1)
    error = said(tmp_path, prompt="S:1=").error
    assert error is not None and f"larger than {JSON_BYTES} bytes" in error.message


async def test_request_for_too_many_completions_is_refused(home: Path) -> None:
    async with serving(home) as api:
        finished(api.ctx)
        with pytest.raises(SpecError, match="too many for one request"):
            await api("complete", "a", [[5]] * 5, [], Sampling(n=COMPLETIONS // 4, max_new_tokens=1))


@pytest.mark.parametrize(
    ("prints", "says"),
    [("[" * 5000, "something else"), ("x" * (1 << 20) * 40, "without end"), ("", "fell over: no idea")],
    ids=["depth", "length", "silence"],
)
async def test_strange_answer_of_a_user_is_no_defect(home: Path, prints: str, says: str) -> None:
    code = f"import sys; print({prints[:1]!r} * {len(prints)}, end=''); print('no idea', file=sys.stderr)"
    async with serving(home) as api:
        finished(api.ctx)
        processes = api.ctx.processes
        processes.commands = replace(processes.commands, completer=(sys.executable, "-c", code))
        with pytest.raises(PoolLost, match=says):
            await api("generate", "a", "hello", Sampling())
