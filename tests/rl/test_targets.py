"""Completions to train on: what a row is, which of its tokens are trained, and which rows are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.errors import SpecError
from lorad.models.directory import resolve
from lorad.rl.completions.targets import TargetDataset, load_held_out, load_train
from lorad.rl.data import Example
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import convert
from tests.rl.test_chat_templates import TEMPLATES, THEN, write

CHAT = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]
ENDS = {
    "qwen3": "<|im_end|>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "gpt_oss": "<|return|>",
}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(resolve("builtin:tiny"))


def load(tokenizer: Tokenizer, cwd: Path, *rows: Any, **data: Any) -> TargetDataset:
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm = data.pop("algorithm", "sft")
    spec = convert({"algorithm": algorithm, "data": {"train": "rows.jsonl", "shuffle": False} | data})
    found = load_train(spec, tokenizer, cwd)
    assert isinstance(found, TargetDataset)
    return found


def refused(tokenizer: Tokenizer, cwd: Path, *rows: Any, **data: Any) -> str:
    with pytest.raises(SpecError) as error:
        load(tokenizer, cwd, *rows, **data)
    assert error.value.hint
    return f"{error.value} {error.value.hint}"


def chat_tokenizer(directory: Path, family: str) -> Tokenizer:
    made = write(directory, (TEMPLATES / f"{family}.jinja").read_text())
    ids = json.loads((made / "tokenizer.json").read_text())["added_tokens"]
    known = {token["content"]: token["id"] for token in ids}
    ends = [known[ENDS[family]], known["<|call|>"]]
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer(made, date=THEN)


def trained(tokenizer: Tokenizer, example: Example) -> list[str]:
    """The trained spans of an example's only target, as text."""
    (target,) = example.targets
    edges = np.flatnonzero(np.diff(np.concatenate([[0], target.trained.astype(int), [0]])))
    return [
        tokenizer.decode(target.tokens[start:end].tolist(), skip_special=False)
        for start, end in edges.reshape(-1, 2).tolist()
    ]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": CHAT[2:]}, CHAT[2:3]),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, CHAT[:1]),
        ({"prompt": "one?", "completion": "1"}, "one?"),
    ],
)
def test_prompts_stay_as_rows_have_them(tmp_path: Path, row: dict[str, Any], prompt: Any) -> None:
    (example,) = load(chat_tokenizer(tmp_path, "chatml"), tmp_path, row | {"answer": 1}).take(0, 1)
    assert example.prompt_value == prompt and (example.answer_value, example.answer) == (1, "1")


@pytest.mark.parametrize("template", ["never", "auto"])  # auto: one that writes nothing but what is said
def test_plain_text_is_trained_with_its_end(template: str, tiny: Tokenizer, tmp_path: Path) -> None:
    found = load(tiny, tmp_path, {"prompt": "S:21=", "completion": "12"}, chat_template=template)
    (example,) = found.take(0, 1)
    assert (found.form, example.prompt, example.tokens) == ("completion", "S:21=", tiny.encode("S:21="))
    assert trained(tiny, example) == ["12<eos>"]
    again = load(tiny, tmp_path, {"prompt": "S:21=", "completion": "12<eos>"})
    assert trained(tiny, again.take(0, 1)[0]) == ["12<eos>"]


@pytest.mark.parametrize("family", ENDS)
def test_a_turn_is_trained_with_its_end_token(family: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, family)
    (example,) = load(tokenizer, tmp_path, {"messages": CHAT[:2]}).take(0, 1)
    (span,) = trained(tokenizer, example)
    said = "<|channel|>final<|message|>1" if family == "gpt_oss" else "1"
    assert span.strip() == f"{said}{ENDS[family]}"
    whole = tokenizer.chats([CHAT[:2]], {}, generate=False)[0]
    assert whole.startswith(example.prompt + span)
    assert example.tokens == tokenizer.encode(tokenizer.chat(CHAT[:1]))


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_every_assistant_turn_is_trained(family: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, family)
    (example,) = load(tokenizer, tmp_path, {"messages": CHAT}).take(0, 1)
    assert trained(tokenizer, example) == [f"1{ENDS[family]}", f"2{ENDS[family]}"]
    text = tokenizer.decode([*example.tokens, *example.targets[0].tokens.tolist()], skip_special=False)
    assert tokenizer.chats([CHAT], {}, generate=False)[0].startswith(text)


def test_turns_of_a_prompt_are_not_trained(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "chatml")
    row = {"prompt": CHAT[:3], "completion": "2"}
    asked = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    found = load(tokenizer, tmp_path, row, asked, system="Be brief.").take(0, 2)
    assert [trained(tokenizer, example) for example in found] == [["2<|im_end|>"]] * 2
    assert "Be brief." in found[0].prompt


THOUGHT: dict[str, dict[str, str]] = {
    "qwen3": {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
    "gpt_oss": {"role": "assistant", "content": "1", "thinking": "hm"},
}


@pytest.mark.parametrize("family", THOUGHT)
def test_a_rewritten_past_makes_each_turn_a_sample(family: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, family)
    chat = [CHAT[0], THOUGHT[family], *CHAT[2:]]
    found = load(tokenizer, tmp_path, {"messages": CHAT[:2]}, {"messages": chat})
    assert (found.size, found.split) == (3, 1)
    for end, example in zip((2, 4), found.take(1, 2), strict=True):
        (span,) = trained(tokenizer, example)
        assert example.prompt == tokenizer.chat(chat[: end - 1])
        assert tokenizer.chats([chat[:end]], {}, generate=False)[0].rstrip() == example.prompt + span
        assert ("hm" in span) == (end == 2) and "hm" not in example.prompt
    assert [example.id for example in found.take(1, 2)] == ["rows.jsonl/2.0/0", "rows.jsonl/2.1/0"]


CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
CALLING: list[dict[str, Any]] = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2", "thinking": "hm"},
]


def test_tool_calls_of_gpt_oss_are_trained(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "gpt_oss")
    found = load(tokenizer, tmp_path, {"messages": CALLING})
    (example,) = found.take(0, 1)
    assert found.unended == found.split == 0
    assert trained(tokenizer, example) == [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 2<|return|>",
    ]


def test_a_turn_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    thinking = [CALLING[0], CALLING[1] | {"thinking": "to add"}, *CALLING[2:]]  # dropped with the answer
    rows: list[Any] = [{"messages": CHAT[:2]}, {"messages": thinking}]
    told = refused(chat_tokenizer(tmp_path, "gpt_oss"), tmp_path, *rows)
    assert "rows.jsonl:2: the chat template renders what is before an assistant's turn in another way" in told
    two = {"prompt": CHAT[:1], "chosen": [THOUGHT["gpt_oss"], *CHAT[2:]], "rejected": [CHAT[1]]}
    told = refused(chat_tokenizer(tmp_path, "gpt_oss"), tmp_path, two, algorithm="dpo")
    assert "several turns of a preference are no one sample" in told


@pytest.mark.parametrize(
    ("row", "settings", "told"),
    [
        ({"messages": CHAT[:1]}, {}, "rows.jsonl:1: no turn of it is the assistant's"),
        ({"messages": "text"}, {}, "rows.jsonl:1: messages is text"),
        ({"prompt": "a"}, {}, "rows.jsonl:1: algorithm sft needs messages or prompt and completion"),
        ({"text": "a"}, {"format": "messages"}, "rows.jsonl:1: the key 'messages' is missing"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused(row: Any, settings: Any, told: str, tmp_path: Path) -> None:
    assert told in refused(chat_tokenizer(tmp_path, "chatml"), tmp_path, row, **settings)


@pytest.mark.parametrize(
    ("row", "algorithm", "key"),
    [
        ({"prompt": "a", "reply": "b"}, "sft", "data.completion_key"),
        ({"prompt": "a", "chosen": "b", "reply": "c"}, "dpo", "data.rejected_key"),
        ({"reply": "b"}, "sft", "data"),
    ],
)
def test_the_key_of_a_missing_column_is_named(
    row: Any, algorithm: str, key: str, tiny: Tokenizer, tmp_path: Path
) -> None:
    assert refused(tiny, tmp_path, row, algorithm=algorithm).startswith(f"{key}: ")


@pytest.mark.parametrize("column", ["conversation", "dialog", "items"])
def test_the_column_of_a_chat_is_named(column: str, tiny: Tokenizer, tmp_path: Path) -> None:
    spoken = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "1"}]
    told = refused(tiny, tmp_path, {"id": 7, column: spoken})
    assert told.startswith("data.messages_key: ") and f"set data.messages_key to {column}." in told


def test_messages_need_a_template(tiny: Tokenizer, tmp_path: Path) -> None:
    told = refused(tiny, tmp_path, {"messages": CHAT}, chat_template="never")
    assert "rows.jsonl:1: messages is a list of messages but data.chat_template is never" in told


def test_whole_samples_are_dropped_or_cut(tiny: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "S:4321=", "completion": "1234"}, {"prompt": "S:1=", "completion": "1"}]
    found = load(tiny, tmp_path, *rows, max_sample_tokens=10)
    assert (found.size, found.dropped) == (1, 1)
    found = load(tiny, tmp_path, *rows, max_sample_tokens=10, too_long="truncate")
    assert [trained(tiny, example) for example in found.take(0, 2)] == [["123"], ["1<eos>"]]
    found = load(tiny, tmp_path, *rows, max_sample_tokens=7, too_long="truncate")
    assert (found.size, found.dropped) == (1, 1)


def test_columns_have_the_names_of_the_spec(tiny: Tokenizer, tmp_path: Path) -> None:
    row = {"q": "S:21=", "a": "12"}
    found = load(tiny, tmp_path, row, prompt_key="q", completion_key="a", answer_key="a")
    (example,) = found.take(0, 1)
    assert (trained(tiny, example), example.answer) == (["12<eos>"], "12")


def test_named_columns_come_before_those_of_others(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "chatml")
    row = {"prompt": "two?", "completion": "2", "conversations": CHAT}
    found = load(tokenizer, tmp_path, row)
    assert (found.form, trained(tokenizer, found.take(0, 1)[0])) == ("completion", ["2<|im_end|>"])
    named = load(tokenizer, tmp_path, row | {"turns": CHAT}, messages_key="turns")
    assert named.form == "messages"
    told = refused(tokenizer, tmp_path, {"conversations": CHAT}, messages_key="turns")
    assert "needs turns or prompt and completion; there is conversations" in told


def test_a_task_trains_on_its_answers(tiny: Tokenizer, tmp_path: Path) -> None:
    spec = convert({"algorithm": "sft", "data": {"train": "sort"}})
    (example,) = load_train(spec, tiny, tmp_path).take(3, 1)
    assert trained(tiny, example) == [f"{example.answer}<eos>"]
    assert len(load_held_out(spec, tiny, tmp_path)[0].targets) == 1


def test_held_out_prompts_may_lack_completions(tiny: Tokenizer, tmp_path: Path) -> None:
    load(tiny, tmp_path, {"prompt": "S:21=", "completion": "12"})
    (tmp_path / "eval.jsonl").write_text('{"prompt": "S:31=", "answer": "13"}\n')
    spec = convert({"algorithm": "sft", "data": {"train": "rows.jsonl", "eval": "eval.jsonl"}})
    (example,) = load_held_out(spec, tiny, tmp_path)
    assert (example.answer, example.targets) == ("13", ())


def test_epochs_have_orders_of_their_own(tiny: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"S:{n}=", "completion": str(n)} for n in range(8)]
    found = load(tiny, tmp_path, *rows, shuffle=True)
    first, second = ([e.prompt for e in found.take(start, 8)] for start in (0, 8))
    assert first != second and sorted(first) == sorted(second)
    assert first == [e.prompt for place in range(8) for e in found.take(place, 1)]


def spans(tokenizer: Tokenizer, example: Example) -> list[str]:
    """What is trained of each completion, as text."""
    return [
        tokenizer.decode(target.tokens[target.trained].tolist(), skip_special=False)
        for target in example.targets
    ]


def test_pairs_have_a_prompt_and_two_completions(tiny: Tokenizer, tmp_path: Path) -> None:
    row = {"prompt": "S:21=", "chosen": "12", "rejected": "21"}
    found = load(tiny, tmp_path, row, algorithm="dpo")
    (example,) = found.take(0, 1)
    assert (found.form, example.prompt, spans(tiny, example)) == (
        "preference",
        "S:21=",
        ["12<eos>", "21<eos>"],
    )
    assert found.lengths.tolist() == [6]


def test_common_turns_of_two_chats_are_the_prompt(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "chatml")
    other = [*CHAT[:3], {"role": "assistant", "content": "3"}]
    rows = [
        {"chosen": CHAT, "rejected": other},
        {"prompt": "two?", "chosen": CHAT, "rejected": other},
        {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": other[3:]},
    ]
    for example in load(tokenizer, tmp_path, *rows, algorithm="dpo").take(0, 3):
        assert spans(tokenizer, example) == ["2<|im_end|>", "3<|im_end|>"]
        assert example.prompt == tokenizer.chat(CHAT[:3])


def test_chats_that_part_too_early_are_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "chatml")
    other = [{"role": "user", "content": "eleven?"}, *CHAT[1:]]
    told = refused(tokenizer, tmp_path, {"chosen": CHAT, "rejected": other}, algorithm="dpo")
    assert "rows.jsonl:1: chosen and rejected differ before the assistant's turn" in told


def test_equal_or_longer_chats_part_at_an_answer(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "chatml")
    longer = [*CHAT, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    rows = [{"chosen": CHAT, "rejected": CHAT}, {"chosen": CHAT, "rejected": longer}]
    equal, prefix = load(tokenizer, tmp_path, *rows, algorithm="dpo").take(0, 2)
    assert spans(tokenizer, equal) == ["2<|im_end|>"] * 2
    assert spans(tokenizer, prefix) == ["2<|im_end|>", "2<|im_end|>yes<|im_end|>"]
    assert equal.prompt == prefix.prompt == tokenizer.chat(CHAT[:3])


def test_labels_are_true_or_false(tiny: Tokenizer, tmp_path: Path) -> None:
    kto = {"name": "dpo", "preference": {"loss": "kto"}}
    row = {"prompt": "S:21=", "completion": "12", "label": True}
    found = load(tiny, tmp_path, row, algorithm=kto)
    assert (found.form, spans(tiny, found.take(0, 1)[0])) == ("labels", ["12<eos>"])
    assert load(tiny, tmp_path, row | {"label": "False"}, algorithm=kto).size == 1
    assert "label is 'yes'" in refused(tiny, tmp_path, row | {"label": "yes"}, algorithm=kto)
    told = refused(tiny, tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, algorithm=kto)
    assert "algorithm dpo with loss kto needs prompt and completion and label" in told


def test_a_task_has_no_pairs(tiny: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="right answers and no wrong ones"):
        load_train(convert({"algorithm": "dpo", "data": {"train": "sort"}}), tiny, tmp_path)
