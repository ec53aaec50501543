"""Environments of the package verifiers, as it is published, are trained through the door.

`make test-verifiers` names the interpreters that have it; without them the tests are skipped.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.driver.door.chat import Chat
from lorad.driver.door.dialects import DIALECTS
from lorad.errors import SpecError
from lorad.protocol.batch import Sampling
from lorad.rl.generated.environment import described
from lorad.spec.env import EnvSpec
from tests.driver.driven import Driven
from tests.kit.pool_kit import TINY, Running, running_pool

PYTHONS = {
    version: os.environ.get(f"LORAD_VERIFIERS_{version.replace('.', '_')}") for version in ("0.3", "0.4")
}
pytestmark = pytest.mark.skipif(not all(PYTHONS.values()), reason="`make test-verifiers` has the packages")
TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }}{% endfor %}\
{# <tool_call>{"name": …, "arguments": …}</tool_call> #}\
{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"""
HOW = (
    *("data.prompts_per_step=2", "algorithm.group_size=2", "eval.every=0", "trainer.steps=1"),
    *("reward.max_failures=0", "rollout.max_new_tokens=8", "env.turns=2", "env.retry=0"),
)
# version, environment, arguments, what its client says beside model, messages and tools, and metrics
CLASSIC = {"temperature", "top_p", "max_completion_tokens"}
STREAMED = {"temperature", "top_p", "max_tokens", "stream", "stream_options"}
PLAYED = {
    "single": ("0.3", "toy-v0", {}, CLASSIC, {"right", "length", "num_turns"}),
    "multi": ("0.3", "toy-v0", {"kind": "multi"}, CLASSIC, {"right", "length", "num_turns"}),
    "tool": ("0.3", "toy-v0", {"kind": "tool"}, CLASSIC, {"right", "total_tool_calls", "add_calls"}),
    "taskset": ("0.4", "toy-v1", {"taskset": {"rows": 9}}, STREAMED, {"reward/right", "letters"}),
    "taskset with a tool": ("0.4", "toy-tool-v1", {}, STREAMED, {"reward/right", "tools_used"}),
}

SOURCES = [("0.3", "toy-v0", "env/num_turns"), ("0.4", "toy-v1", "env/reward/right")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("packages")
    model = shutil.copytree(TINY, home / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with running_pool(home, deterministic=False, model=str(model), model_path=str(model)) as pool:
        yield pool


@pytest.mark.parametrize("case", PLAYED)
def test_environments_of_packages_are_trained(
    case: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, name, args, body, metrics = PLAYED[case]
    bodies = list[dict[str, Any]]()
    chat = DIALECTS["chat/completions"]

    def listening(text: bytes, how: Sampling) -> Chat:
        bodies.append(msgspec.json.decode(text))
        return chat.read(text, how)

    monkeypatch.setitem(DIALECTS, "chat/completions", chat._replace(read=listening))
    home = Path(running.config.socket).parent
    said = msgspec.json.encode(args).decode()
    env = f"env={{name: 'verifiers:{name}', python: {PYTHONS[version]}, args: {said}}}"
    own = (f"model.path={home / 'model'}", f"data.train=verifiers:{name}", "deterministic=false", env)
    run = Driven(running, home, case.replace(" ", "-"), *own, *HOW)
    end = run.drive()
    assert end.reason == "completed", end.detail
    (step,) = run.facts("step")
    samples = [
        msgspec.json.decode(line) for line in (run.run.root / step.data["samples"]).read_text().splitlines()
    ]
    assert len(samples) == 4 and {sample.get("error") or "" for sample in samples} == {""}
    assert {f"env/{metric}" for metric in metrics} <= {*step.data["metrics"]}
    assert abs(step.data["metrics"]["logprob_difference"]) < 1e-3
    assert {frozenset(asked) - {"model", "messages", "tools"} for asked in bodies} == {frozenset(body)}
    if case == "multi":
        assert {(len(sample["turns"]), sample["end"]) for sample in samples} >= {(2, "turns")}


@pytest.mark.parametrize(("version", "name", "metric"), SOURCES)
def test_packages_are_sources_among_others(version: str, name: str, metric: str, running: Running) -> None:
    home = Path(running.config.socket).parent
    (home / "plain.jsonl").write_text(
        '{"prompt": "S:21=", "answer": "12"}\n{"prompt": "S:31=", "answer": "13"}'
    )
    env = {"python": PYTHONS[version], "turns": 2, "concurrency": 4, "start_timeout": 3000}
    train = {f"verifiers:{name}": {"env": env}, "plain.jsonl": {"reward": "exact_match"}}
    named = f"data.train={msgspec.json.encode(train).decode()}"
    how = [each for each in HOW if not each.startswith(("env.", "data."))]
    own = (f"model.path={home / 'model'}", "data.prompts_per_step=2", "deterministic=false", named)
    run = Driven(running, home, f"among-{name}", *own, *how)
    end = run.drive()
    assert end.reason == "completed", end.detail
    (step,) = run.facts("step")
    lines = (run.run.root / step.data["samples"]).read_text().splitlines()
    samples = [msgspec.json.decode(line) for line in lines]
    kinds = {(each["source"], bool(each.get("turns")), each.get("error") or "") for each in samples}
    assert len(samples) == 4
    assert kinds == {(f"verifiers_{name}", True, ""), ("plain.jsonl", False, "")}
    assert {metric, "reward_of/plain.jsonl"} <= {*step.data["metrics"]}


@pytest.mark.parametrize(
    ("version", "name", "args", "problem"),
    [
        ("0.3", "toy-v0", {"kind": "group"}, "rewards of a whole group"),
        ("0.3", "toy-v0", {"sort": 1}, "unexpected keyword argument 'sort'"),
        ("0.3", "toy-v1", {}, "written for verifiers 0.4, and"),
        ("0.4", "toy-v0", {}, "written for verifiers 0.1 to 0.3, and"),
        ("0.4", "toy-v1", {"agent": {"runtime": {"type": "prime"}}}, "runs in the cloud"),
        ("0.4", "toy-v1", {"agent": {"harness": {"id": "bash"}}}, "executes what the model writes"),
        ("0.4", "toy-v1", {"agent": {"harness": {"id": "codex"}}}, "and would do so as you"),
        ("0.4", "toy-v1", {"id": "user-sim"}, "2 agents that would be trained"),
        ("0.4", "toy-v1", {"taskset": {"rows": 3, "kind": 1}}, "env.args: "),
        ("0.4", "no-such", {}, "has no module no_such"),
    ],
)
def test_packages_refuse_what_cannot_be(
    version: str, name: str, args: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as refused:
        described(EnvSpec(name=f"verifiers:{name}", python=PYTHONS[version], args=args), tmp_path)
    assert problem in refused.value.message and refused.value.hint
