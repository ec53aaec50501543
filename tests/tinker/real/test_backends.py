"""The official client on each trainer and each engine that lorad has: `make tinker ARGS='-m long'`, with the
interpreters that `.ci/setup-engines` names.
"""

import json

import pytest

from tests.tinker.real.test_client import a_door, pytestmark, said  # noqa: F401 (skips without the client)
from tests.trainers.real.pairs import configured, missing


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "engine"),
    [("fsdp", "builtin"), ("megatron", "builtin"), ("builtin", "sglang"), ("builtin", "vllm")],
)
def test_the_client_finds_nothing_wrong(trainer: str, engine: str) -> None:
    if absent := missing(trainer, engine):
        pytest.skip(f"{' and '.join(absent)}: no interpreter is named, `.ci/setup-engines` installs them")
    chosen = f", overrides: [trainer.backend={trainer}, rollout.backend={engine}]"
    with a_door(chosen, json.dumps(configured(trainer, engine))):
        output = said("client_check.py")
    print(output)
    assert output.splitlines()[-1].startswith("all "), output
