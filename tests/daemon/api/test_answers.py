"""The JSON of a daemon's answers: keys, their order and nulls stay as they are kept in tests/data/answers.

`make snapshots` writes those files again; look at what `git diff` changed before you keep it.
"""

import json
from pathlib import Path

import pytest

from lorad.client.client import Client
from lorad.client.transport import Transport
from tests.kit.frozen.world import frozen

__all__ = ["frozen"]
KEPT = Path(__file__).parents[2] / "data/answers"
MOST = 4  # items of a list that are kept
PATHS = {
    "status": "/v1/status",
    "pools": "/v1/pools",
    "devices": "/v1/devices",
    "nodes": "/v1/nodes",
    "runs": "/v1/runs?all=1",
    "show": "/v1/runs/gsm8k-32k",
    "steps": "/v1/runs/sorter/steps",
    "evals": "/v1/runs/sorter/evals",
    "samples": "/v1/runs/essays/samples",
    "checkpoints": "/v1/runs/bold-lr/checkpoints",
    "logs": "/v1/runs/sorter/logs",
    "versions": "/v1/versions",
    "aliases": "/v1/aliases",
    "moves": "/v1/aliases/canary/moves",
    "events": "/v1/events?last=20",
}


@pytest.mark.parametrize("name", PATHS)
def test_an_answer_keeps_its_json(name: str, frozen: Client, request: pytest.FixtureRequest) -> None:
    answer = Transport(frozen.home.socket, 60.0).ask("GET", PATHS[name])
    shown = answer | {"items": answer["items"][:MOST]} if "items" in answer else answer
    text = json.dumps(shown, indent=1, ensure_ascii=False) + "\n"
    if request.config.getoption("update_snapshots"):
        (KEPT / f"{name}.json").write_text(text)
    assert text == (KEPT / f"{name}.json").read_text()
