"""The tokens that end completions: of the configuration, the tokenizer, and the chat template."""

import json
from pathlib import Path

import pytest

from lorad.rl.tokenizer import Tokenizer
from tests.rl.chats.test_rows_of_chats import TEMPLATE
from tests.rl.test_chat_templates import TEMPLATES, write

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITH_CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ '<|call|>' if m.tool_calls else '<|return|>' }}"
    "{% endfor %}"
)


def ends(directory: Path, template: str, **generation: object) -> list[str]:
    """Write a model whose tokenizer ends with </s>, and say what ends its completions."""
    write(directory, template)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer(directory)
    found = [tokenizer.decode([number], skip_special=False) for number in tokenizer.eos_ids]
    assert tokenizer._renderer is not None and tokenizer._renderer.process is None
    assert [found[tokenizer.eos_ids.index(number)] for number in tokenizer.late_ends] == found[1:]
    return found


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("qwen3", ["<|im_end|>"]),
        ("chatml", ["<|im_end|>"]),
        ("llama3", ["<|eot_id|>"]),
        ("gemma", ["<end_of_turn>"]),
        ("gpt_oss", ["<|return|>", "<|call|>"]),
        ("mistral", []),
    ],
)
def test_the_end_of_a_turn_ends_completions(family: str, end: list[str], tmp_path: Path) -> None:
    assert ends(tmp_path, (TEMPLATES / f"{family}.jinja").read_text()) == ["</s>", *end]


def test_the_configuration_comes_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert ends(tmp_path, TEMPLATE, eos_token_id=[5]) == [
        Tokenizer(tmp_path).decode([5]),
        "</s>",
        "<|im_end|>",
    ]
    assert Tokenizer(tmp_path).pad_id == Tokenizer(tmp_path).number_of("</s>")


@pytest.mark.parametrize("template", [PLAIN, "{{ raise_exception('no') }}", "{% if %}", "{{ 'x' }}"])
def test_a_template_without_an_end_adds_none(template: str, tmp_path: Path) -> None:
    assert ends(tmp_path, template) == ["</s>"]


def test_the_end_of_a_call_ends_completions(tmp_path: Path) -> None:
    assert ends(tmp_path, WITH_CALLS) == ["</s>", "<|return|>", "<|call|>"]
    assert ends(tmp_path, WITH_CALLS.replace("<|call|>", "</call>")) == ["</s>", "<|return|>"]


MORE = [("", False), ("{{ eos_token }}", False), ("{{ turn_token }}", True)]


@pytest.mark.parametrize(("more", "is_asked"), MORE)
def test_templates_without_tokens_start_no_process(
    more: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()

    def probed(_: Tokenizer, chat: object) -> str:
        asked.append(chat)
        return ""

    monkeypatch.setattr(Tokenizer, "_probed", probed)
    assert ends(tmp_path, PLAIN + more) == ["</s>"]
    assert bool(asked) is is_asked
