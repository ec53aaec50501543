"""Chat templates: text and token ids as transformers makes them; and templates that never end."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from lorad.errors import SpecError
from lorad.rl.data import load_data
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.model import convert

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
THEN = "2024-07-26T10:30:00"
MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|channel|>",
    "<|message|>",
)
TOOL = {
    "name": "läng",
    "description": "How <long> it is",
    "parameters": {"type": "object", "properties": {"b": 1, "a": 2}},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "reasoning_effort": "high", "bos_token": "<other>"},
    {
        "tools": [{"type": "function", "function": TOOL}],
        "tools_in_user_message": False,
        "documents": [{"text": "é"}],
    },
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Wie groß ist <b> 'π' & \"e\"? "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\none", "reasoning": "hm", "name": None},
        {"role": "user", "content": "2"},
    ],
]


def write(directory: Path, template: str) -> Path:
    """A tokenizer with a token for each byte, the marks of chats, and ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", *MARKS])
    made.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    (directory / "chat_template.jinja").write_text(template)
    return directory


class Then(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.fromisoformat(THEN)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "chatml", "gemma", "mistral", "gpt_oss"])
def test_ids_of_chats_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    directory = write(tmp_path, (TEMPLATES / f"{family}.jinja").read_text())
    golden = PreTrainedTokenizerFast.from_pretrained(directory)
    ours = Tokenizer(directory, date=THEN)
    for settings in SETTINGS:
        texts = ours.chats(CHATS, settings)
        for chat, text in zip(CHATS, texts, strict=True):
            made = golden.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **settings)
            assert ours.encode(text) == made
            assert text == golden.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **settings
            )


PROBES = {
    "{{ tools is none }} {{ documents is none }}": "True True",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}": "<ü>",
    "{{ messages[0]|tojson(ensure_ascii=False, separators=(',',':')) }}": '{"role":"user","content":"<ü>"}',
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}": "<s></s></s>False",
    "{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%d %b') }}": "26 Jul",
    "{{ add_generation_prompt }}{{ enable_thinking }}": "TrueFalse",
}


def test_a_template_finds_what_transformers_gives_it(tmp_path: Path) -> None:
    found = Tokenizer(write(tmp_path, "|".join(PROBES)), date=THEN)
    text = found.chat([{"role": "user", "content": "<ü>"}], {"enable_thinking": False})
    assert text.split("|") == [*PROBES.values()]


SWOLLEN = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.system(but=["{% if %}-Expected an expression"])
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (ENDLESS, r"it takes over 0\.5 s"),
        (SWOLLEN, "it needs over 1 GiB of memory"),
        ("{{ 'x' * (17 * 1024 * 1024) }}", "it writes over 16 MiB"),
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_hostile_template_is_refused_with_its_line(
    template: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template == ENDLESS:
        monkeypatch.setattr("lorad.rl.tokenizer.TEMPLATE_SECONDS", 0.5)
    guarded = (
        "{% if messages[0].content == 'x' %}" + template + "{% endif %}ok"
        if says.startswith("it")
        else template
    )
    tokenizer = Tokenizer(write(tmp_path, guarded))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "x"}\n{"prompt": "b"}\n')
    line = 2 if says.startswith("it") else 1
    with pytest.raises(
        SpecError, match=rf"rows\.jsonl:{line}: the chat template refused the messages: .*{says}"
    ):
        load_data("rows.jsonl", "train", Data(), tokenizer, 0, tmp_path)
    if line == 1:
        with pytest.raises(SpecError, match=f"the chat template refused the messages: .*{says}"):
            tokenizer.chat([{"role": "user", "content": "x"}])
    else:
        # by another process where one was killed
        assert tokenizer.chat([{"role": "user", "content": "a"}]) == "ok"
    tokenizer.close()


def test_rows_are_rendered_once_with_system_and_settings(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ enable_thinking }}"
    tokenizer = Tokenizer(write(tmp_path, template))
    own = {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "a"}, own)))
    data = Data(system="Be brief.", chat_template_kwargs={"enable_thinking": False}, shuffle=False)
    found = load_data("rows.jsonl", "train", data, tokenizer, 0, tmp_path)
    tokenizer.close()
    assert [e.prompt for e in found.take(0, 2)] == [
        "[system]Be brief.[user]aFalse",
        "[system]own[user]bFalse",
    ]
    assert tokenizer._renderer is not None and tokenizer._renderer.process is None  # no step needs it again


def test_settings_that_nothing_would_read_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, "{{ messages[0].content }}"))
    with pytest.raises(SpecError, match=r"data\.system: prompts of the task sort are plain text"):
        load_data("sort", "train", Data(system="x"), tokenizer, 0, tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(SpecError, match="tokenize is no variable of a template"):
        load_data(
            "rows.jsonl", "train", Data(chat_template_kwargs={"tokenize": True}), tokenizer, 0, tmp_path
        )
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(SpecError, match=r"data\.chat_template_kwargs: the model has no chat template"):
        load_data(
            "rows.jsonl", "train", Data(chat_template_kwargs={"a": 1}), Tokenizer(tmp_path), 0, tmp_path
        )
    with pytest.raises(SpecError, match="chat_template is never"):
        convert({"data": {"chat_template": "never", "system": "x"}})


def test_the_process_that_renders_never_loads_torch(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, "{{ messages[0].content }}"))
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == "a"
    assert tokenizer._renderer is not None and (process := tokenizer._renderer.process) is not None
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    tokenizer.close()
    assert process.returncode is not None
