"""Runs whose environment is of verifiers, a stand-in of it: what the spec implies and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorad.errors import SpecError
from lorad.preflight.user_code import check_env
from lorad.rl.data import load_eval
from lorad.rl.doubts import refuse_contradictions
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import Spec, to_json
from lorad.spec.text import from_json, load_task
from tests.kit.pool_kit import TINY, Running, running_pool

FAKES = Path(__file__).parent / "fake_verifiers"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
NAME = "verifiers:owner/classic-toy"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("verifiers")
    model = shutil.copytree(TINY, home / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with running_pool(home, deterministic=False, model=str(model), model_path=str(model)) as pool:
        yield pool


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKES / "old"))


def spec_of(*overrides: str) -> Spec:
    return load_task(f"env: {NAME}", overrides=overrides)


def test_an_environment_implies_its_rows() -> None:
    spec = spec_of("data.prompts_per_step=4")
    assert (spec.data.train, spec.deterministic) == (NAME, False)
    assert (spec.env.workers, spec.env.concurrency) == (1, 16)
    assert spec_of("deterministic=true", "env.concurrency=3").env.concurrency == 3
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{{env: '{NAME}', data: {{train: sort}}}}", "plays its own rows, and not sort"),
        (f"{{env: '{NAME}', data: {{eval: rows.jsonl}}}}", "plays its own rows, and not rows.jsonl"),
        (f"{{data: {{train: '{NAME}'}}}}", "is an environment, and env.name is not it"),
        (f"{{env: '{NAME}', reward: gsm8k}}", "gives the reward of an episode"),
    ],
)
def test_rows_of_others_are_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        refuse_contradictions(load_task(text))


def test_an_id_is_needed() -> None:
    with pytest.raises(SpecError, match="name is verifiers:ID, such as"):
        load_task("env: 'verifiers:../x'")


def test_tools_without_a_form_are_refused(running: Running, tmp_path: Path) -> None:
    home = Path(running.config.socket).parent
    tokenizer = Tokenizer(home / "model")
    plain = spec_of("env.args={kind: talk}")
    (example,) = load_eval(plain.data, tokenizer, 1, tmp_path, plain.env)
    check_env(plain, example, tokenizer, tmp_path)
    with pytest.raises(SpecError, match="offers tools, and lorad does not know"):
        check_env(spec_of("env.args={kind: talk, tool_defs: [add]}"), example, tokenizer, tmp_path)
    tokenizer.close()
