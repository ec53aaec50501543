"""Renderers, and what holds of every format: the context of a turn is the tokens before it, unchanged."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from lorad.driver.sampling.episodes import LiveEpisode, begin_episodes, hear
from lorad.envs.child import EpisodeAnswer
from lorad.envs.format import Format
from lorad.envs.host import HostedEpisode
from lorad.envs.rendered import open_format
from lorad.errors import SpecError
from lorad.protocol.batch import Chunk, Sampling
from lorad.records.episodes import Task
from lorad.rl.data import Example
from lorad.rl.tokenizer import Tokenizer
from lorad.rl.tools.specs import wrapped_all
from lorad.spec.model import convert
from tests.rl.test_chat_templates import TEMPLATES

ENDS = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}
MARKS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    *("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
FORGETS = "{% for m in messages[-1:] %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
WORDS = ["\n\n\n ", " a\n", "aa", "aaa ", "  \n", "</", "think", "assistant\n", "<|", "éé", "user\n\n"]
SHOWS = """{%- for message in messages %}{% if message.role == "tool" -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}"""  # which the real template of Qwen3 has
PIECES = [*WORDS, *MARKS, "\u2028", "\x00", "\U0001f600", "x"]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


def add(a: int, b: bool = False) -> int:
    """Add."""
    return a


TOOLS = wrapped_all([add])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that merges over the ends of words and lines, so that text has many spellings."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["".join(WORDS[i:] + WORDS[:i]) * 3 for i in range(len(WORDS))], trainer)
    made.add_special_tokens([*MARKS])
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    made.save(str(path))
    return path


def model(directory: Path, vocabulary: Path, template: str, end: str) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_bytes(vocabulary.read_bytes())
    names = {"eos_token": end, "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer(directory)


def opened(tokenizer: Tokenizer, form: str = "auto", **data: Any) -> tuple[Format, Any]:
    env = {"name": "e.py:E", "format": form, "turns": 9, "max_tokens": 100_000}
    spec = convert({"data": {"train": "rows.jsonl", **data}, "env": env})
    return open_format(spec, tokenizer), spec


def qwen3(directory: Path, vocabulary: Path, template: str | None = None) -> Tokenizer:
    text = (TEMPLATES / "qwen3.jinja").read_text() if template is None else template
    return model(directory, vocabulary, text, "<|im_end|>")


@pytest.fixture(scope="module")
def formats(
    tmp_path_factory: pytest.TempPathFactory, vocabulary: Path
) -> dict[str, tuple[Format, Any, Tokenizer]]:
    root, found = tmp_path_factory.mktemp("models"), dict[str, Any]()
    for family, end in ENDS.items():
        tokenizer = model(root / family, vocabulary, (TEMPLATES / f"{family}.jinja").read_text(), end)
        found[family] = (*opened(tokenizer), tokenizer)
        found["text"] = (*opened(tokenizer, "text"), tokenizer)
    tokenizer = qwen3(root / "renderer", vocabulary, FORGETS)
    found["renderer"] = (*opened(tokenizer, "qwen3"), tokenizer)
    return found


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", [*ENDS, "text", "renderer"])
@given(data=st.data())
def test_contexts_are_prompt_and_runs(name: str, formats: Any, data: st.DataObject) -> None:
    form, spec, tokenizer = formats[name]
    live = LiveEpisode(0, 0, lambda turn: turn, HostedEpisode(0, Task({}, 0)))
    how, said = Sampling(8), EpisodeAnswer(data.draw(HOSTILE) + "?")
    example = begin_episodes(spec, form, Example("0", "", "", [], {}), [live], [said], how)
    assert live.end is None and live.context == example.tokens
    before, ordinary = [*live.context], st.integers(0, 329)  # below the marks: a thought may stay open
    for _ in range(3):
        end = tokenizer.eos_ids[0]
        made = [*data.draw(st.lists(ordinary, max_size=8)), end]  # as no text would be tokenised
        tokens, figures = np.array(made, np.int32), np.zeros(len(made), np.float32)
        live.say([Chunk("0", 0, "r@0", tokens, figures, "stop")], form)
        hear(spec, form, live, EpisodeAnswer(data.draw(HOSTILE) + "!"), how)
        assert live.end is None, live.error
        assert live.context[: len(before) + len(made)] == before + made
        before = [*live.context]
        runs = np.concatenate([tokens for tokens, _ in live.parts])
        assert live.context == example.tokens + runs.tolist() and not live.forks


@pytest.mark.parametrize("role", ["user", "tool"])
def test_renderer_and_difference_agree(role: str, tmp_path: Path, vocabulary: Path) -> None:
    template = (TEMPLATES / "qwen3.jinja").read_text().replace("{%- for message in messages %}", SHOWS, 1)
    tokenizer = qwen3(tmp_path, vocabulary, template)
    ours, theirs = opened(tokenizer)[0], opened(tokenizer, "qwen3")[0]
    told, asked = [{"role": role, "content": "3  \n\n"}], [{"role": "user", "content": "1+2?"}]
    assert ours.first(asked) == theirs.first(asked)
    read = ours.first(asked)[1]
    said = tokenizer.encode("<think>\nhm\n</think>\n\nso<|im_end|>")
    assert ours.following(told) == theirs.following(told, (), (read, said))


def test_renderer_reads_calls(tmp_path: Path, vocabulary: Path) -> None:
    form = opened(tokenizer := qwen3(tmp_path, vocabulary), "qwen3")[0]
    texts = ['{"name": "add", "arguments": {"a":1}}', '{"name": "add", "argu', '{"name": "sub"}']
    said = "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    calls = form.turn(tokenizer.encode(f"{said}<|im_end|>"), "stop", TOOLS).calls
    assert [call.outcome for call in calls] == ["ok", "invalid_json", "unknown_tool"]
    assert calls[0].arguments == {"a": 1} and calls[1].error and "there are: add" in calls[2].error


@pytest.mark.parametrize(
    ("form", "data", "says", "key"),
    [
        ("auto", {}, "no end token", "env.format"),
        ("qwen-3", {}, "there is no format 'qwen-3'", "env.format"),
        ("custom", {}, "there is no format 'custom'", "env.format"),
        ("glm-5", {}, "the renderer glm-5 is not for this model", "env.format"),
        ("qwen3", {"chat_template_kwargs": {"thinks": 1}}, "is not for this model", "env.format"),
    ],
)
def test_formats_that_do_not_fit_are_refused(
    form: str, data: dict[str, Any], says: str, key: str, tmp_path: Path, vocabulary: Path
) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        opened(qwen3(tmp_path, vocabulary, FORGETS), form, **data)
    assert caught.value.key == key and caught.value.hint


def test_template_that_hides_results_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    template = "{# <tool_call> tools #}" + (TEMPLATES / "qwen3.jinja").read_text()
    with pytest.raises(SpecError, match="does not show what a tool answers") as caught:
        opened(qwen3(tmp_path, vocabulary, template))[0].first("1+2?", TOOLS)
    assert caught.value.key == "env.format"


def test_missing_library_is_named(tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(SpecError, match="the library is missing") as caught:
        opened(qwen3(tmp_path, vocabulary), "qwen3")
    assert "lorad[envs]" in str(caught.value.hint)
