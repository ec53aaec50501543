"""Observations as tokens: what follows a turn, by concatenation alone."""

import json
from pathlib import Path

import pytest

from lorad.envs.format import Format
from lorad.errors import SpecError
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import Spec, convert
from tests.rl.test_chat_templates import TEMPLATES, write

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FORGETS = "{% for m in messages[-1:] %}{{ m.role }}{{ m.content }}</s>{% endfor %}"
ENDLESS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def spec(form: str = "auto") -> Spec:
    return convert({"data": {"train": "rows.jsonl"}, "env": {"name": "lookup", "format": form}})


def of(directory: Path, template: str) -> tuple[Format, Tokenizer]:
    tokenizer = Tokenizer(write(directory, template))
    return Format(spec(), tokenizer), tokenizer


def test_episode_equals_the_chat_that_it_becomes(tmp_path: Path) -> None:
    form, tokenizer = of(tmp_path, CHATML)
    _, tokens = form.first("what is π?")
    tokens += tokenizer.encode("look it up</s>")
    tokens += form.following([{"role": "tool", "content": " 3.14 "}])
    chat = [
        {"role": "user", "content": "what is π?"},
        {"role": "assistant", "content": "look it up"},
        {"role": "tool", "content": " 3.14 "},
    ]
    assert tokens == tokenizer.encode(tokenizer.chat(chat))


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma", "<end_of_turn>"),
        ("mistral", "</s>"),
    ],
)
def test_templates_of_models_say_what_follows(tmp_path: Path, family: str, end: str) -> None:
    directory = write(tmp_path, (TEMPLATES / f"{family}.jinja").read_text())
    (ends,) = Tokenizer(directory).encode(end)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [ends, 0]}))
    tokenizer = Tokenizer(directory)
    form = Format(spec(), tokenizer)
    assert form.ends_turn(ends) and not form.ends_turn(0)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chat += [{"role": "user", "content": "three"}]
    behind = tokenizer.chat(chat).rpartition(f"two{end}")[2]
    assert "three" in behind and tokenizer.decode(form.following("three"), skip_special=False) == behind


def test_only_the_template_end_can_be_followed(tmp_path: Path) -> None:
    form, tokenizer = of(tmp_path, CHATML)
    assert form.ends_turn(tokenizer.encode("</s>")[0])
    assert not form.ends_turn(tokenizer.encode("x")[0])


@pytest.mark.parametrize("template", [FORGETS, ENDLESS])
def test_templates_that_rewrite_turns_are_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(SpecError, match="no end token") as caught:
        of(tmp_path, template)[0].following("more")
    assert caught.value.key == "env.format"


def test_text_takes_observations_as_they_are(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, CHATML))
    form = Format(spec("text"), tokenizer)
    assert form.first("S:")[1] + form.following("\nR:") == tokenizer.encode("S:\nR:")
    assert form.ends_turn(0)
    with pytest.raises(SpecError, match="nothing renders them"):
        form.following([{"role": "user", "content": "x"}])
