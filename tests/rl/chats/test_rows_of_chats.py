"""Rows of chats are trained as they say: tools, weights, parts of content, and what Parquet made up."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import csv, parquet

from lorad.preflight.rows import check_rows
from lorad.rl.completions.targets import TargetDataset, load_train
from lorad.rl.data import Dataset, load_data
from lorad.rl.rows.messages import chat_in
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.data import Data
from lorad.spec.model import convert
from tests.rl.test_chat_templates import write
from tests.rl.test_targets import load, refused, trained

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED: dict[str, Any] = {"role": "user", "content": "Ulm?"}


def made(directory: Path, template: str = TEMPLATE) -> Tokenizer:
    """A model whose configuration names the end token of its template."""
    write(directory, template)
    known = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    end = next(token["id"] for token in known if token["content"] == "<|im_end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return Tokenizer(directory)


def calling(arguments: Any, **message: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **message}


def of_parquet(tokenizer: Tokenizer, cwd: Path, *rows: dict[str, Any]) -> TargetDataset:
    parquet.write_table(pyarrow.Table.from_pylist([*rows]), cwd / "rows.parquet")
    data = {"train": "rows.parquet", "shuffle": False}
    found = load_train(convert({"algorithm": "sft", "data": data}), tokenizer, cwd)
    assert isinstance(found, TargetDataset)
    return found


def prompts(tokenizer: Tokenizer, cwd: Path, *rows: Any) -> Dataset:
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data("rows.jsonl", "train", Data(shuffle=False), tokenizer, 0, cwd)


@pytest.mark.parametrize("content", ["", None, "  ", "absent", "I look."])
def test_a_call_ends_with_its_end_token(content: str | None, tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    turn = calling("{}") if content == "absent" else calling("{}", content=content)
    found = load(tokenizer, tmp_path, {"messages": [ASKED, turn]})
    (span,) = trained(tokenizer, found.take(0, 1)[0])
    said = content if content == "I look." else ""
    assert span.strip() == f"{said}<call>weather {{}}</call><|im_end|>" and found.unended == 0


@pytest.mark.parametrize("said", [">", "|>", "im_end|>", "a <|im_end|>", "<|im_end|>"])
def test_words_like_an_end_get_no_other(said: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    row = {"messages": [ASKED, {"role": "assistant", "content": said}]}
    (span,) = trained(tokenizer, load(tokenizer, tmp_path, row).take(0, 1)[0])
    assert span == f"{said}<|im_end|>"


def test_a_call_without_an_end_gets_one(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, TEMPLATE.replace("<|im_end|>\n", "\n"))
    found = load(tokenizer, tmp_path, {"messages": [ASKED, calling("{}")]})
    (span,) = trained(tokenizer, found.take(0, 1)[0])
    assert span == "<call>weather {}</call><|im_end|>" and found.unended == 0


FORMS = {
    "weight": 0,
    "loss": False,
    "train": False,
    "trainable": 0,
    "training": False,
    "loss_mask": 0.0,
}


@pytest.mark.parametrize("key", FORMS)
def test_a_turn_that_says_no_is_not_trained(key: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    wrong = {"role": "assistant", "content": "wrong", key: FORMS[key]}
    right = {"role": "assistant", "content": "right", key: 1}
    chat = [ASKED, wrong, ASKED, right]
    rows = [
        {"messages": chat},
        {"prompt": [ASKED], "completion": chat[1:]},
        {
            "messages": [
                {"from": "human", "value": "Ulm?"},
                {"from": "gpt", "value": "wrong", key: FORMS[key]},
                *chat,
            ]
        },
    ]
    for row in rows:
        (example,) = load(tokenizer, tmp_path, row).take(0, 1)
        assert trained(tokenizer, example) == ["right<|im_end|>"]
        whole = example.prompt + tokenizer.decode(example.targets[0].tokens.tolist(), skip_special=False)
        assert "wrong<|im_end|>" in whole and key not in whole


def test_weights_that_are_neither_are_refused(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    for value in (0.5, "0", [0, 1], -1):
        row = {"messages": [ASKED, {"role": "assistant", "content": "a", "weight": value}]}
        assert "message 2 of messages has weight" in refused(tokenizer, tmp_path, row)
    row = {"messages": [ASKED, {"role": "assistant", "content": "a", "loss": 0}]}
    assert "each turn of the assistant's says that it is not trained" in refused(tokenizer, tmp_path, row)


def test_preferences_leave_out_what_says_no(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    first, last, other = ({"role": "assistant", "content": said} for said in ("first", "last", "other"))
    turns = [first | {"weight": 0}, ASKED]
    row = {"prompt": [ASKED], "chosen": [*turns, last], "rejected": [*turns, other]}
    (example,) = load(tokenizer, tmp_path, row, algorithm="dpo").take(0, 1)
    said = [tokenizer.decode(t.tokens[t.trained].tolist(), skip_special=False) for t in example.targets]
    assert said == ["last<|im_end|>", "other<|im_end|>"]


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "required": None}},
}


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"functions": [TOOL["function"]]},
        {"input": {"tools": [TOOL]}},
        {"chat_template_kwargs": {"tools": [TOOL]}},
        {"chat_template_kwargs": json.dumps({"tools": [TOOL]})},
    ],
)
def test_tools_of_a_row_reach_its_template(columns: Any, tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    shown = f"[{json.dumps(TOOL)}]<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n"
    chat = load(
        tokenizer,
        tmp_path,
        {"messages": [ASKED, calling("{}")], **columns},
        {"messages": [ASKED, calling("{}")]},
    )
    assert [example.prompt for example in chat.take(0, 2)] == [shown, shown.partition("]")[2]]
    asked = prompts(tokenizer, tmp_path, {"prompt": "Ulm?", **columns}, {"prompt": "Ulm?"})
    assert [example.prompt for example in asked.take(0, 2)] == [shown, shown.partition("]")[2]]


def test_an_empty_list_of_tools_is_none(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, "{{ tools is none }}" + TEMPLATE)
    empties: list[Any] = [[], "[]", "", None]
    for empty in empties:
        (example,) = prompts(tokenizer, tmp_path, {"prompt": "Ulm?", "tools": empty}).take(0, 1)
        assert example.prompt.startswith("True<|im_start|>user")


def test_keys_that_parquet_made_up_are_left_out(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
        }
    ]
    others = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "strict": True,
                "parameters": {"properties": {"day": {"enum": ["a"]}}},
            },
        }
    ]
    rows = [
        {"messages": [ASKED, calling({"city": "Ulm"})], "tools": tools},
        {
            "messages": [ASKED | {"name": "ann"}, calling({"day": 1}, content="I look.", weight=1)],
            "tools": others,
        },
    ]
    found = of_parquet(tokenizer, tmp_path, *rows).take(0, 2)
    assert [trained(tokenizer, example) for example in found] == [
        ['<call>weather {"city": "Ulm"}</call><|im_end|>'],
        ['I look.<call>weather {"day": 1}</call><|im_end|>'],
    ]
    for example, row in zip(found, rows, strict=True):
        assert json.loads(example.prompt.partition("<|im_start|>")[0]) == row["tools"]


def test_a_null_that_is_written_stays(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    found = load(tokenizer, tmp_path, {"messages": [ASKED, calling({"city": None})]})
    assert trained(tokenizer, found.take(0, 1)[0]) == ['<call>weather {"city": null}</call><|im_end|>']


@pytest.mark.parametrize(("template", "joint"), [(TEMPLATE, "\n"), (IN_PARTS, "")], ids=["text", "parts"])
def test_parts_are_joined_as_the_template_does(template: str, joint: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, template)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "image_url": None}]
    chat = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    (example,) = load(tokenizer, tmp_path, {"messages": chat}).take(0, 1)
    assert trained(tokenizer, example) == [f"one{joint}two<|im_end|>"]
    assert example.prompt.count(f"one{joint}two<|im_end|>") == 2
    picture = [parts[0], {"type": "image_url", "image_url": {"url": "a.png"}, "text": "a cat"}]
    told = refused(tokenizer, tmp_path, {"messages": [ASKED | {"content": picture}, chat[2]]})
    assert "message 1 of messages has a part of type image_url" in told


@pytest.mark.parametrize(
    "template", [TEMPLATE, IN_PARTS, TEMPLATE.replace("m.content or ''", "(m.content or '') | trim")]
)
def test_a_prompt_goes_on_where_it_ends(template: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, template)
    words = "Let me think.\n<think>"
    for content in (words, [{"type": "text", "text": words}]):
        row = {"prompt": [ASKED, {"role": "assistant", "content": content}]}
        (example,) = prompts(tokenizer, tmp_path, row).take(0, 1)
        assert example.prompt == f"<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n{words}"


@pytest.mark.parametrize(
    ("template", "turn", "why"),
    [
        (TEMPLATE, calling("{}", content="I look."), "has no words to continue"),
        (TEMPLATE, {"role": "assistant", "content": ""}, "has no words to continue"),
        (
            TEMPLATE.replace("m.content or ''", "(m.content or '') | upper"),
            {"role": "assistant", "content": "Yes"},
            "cannot be continued",
        ),
    ],
)
def test_what_cannot_go_on_is_refused(template: str, turn: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=rf"rows\.jsonl:1: the chat template refused the messages: .*{why}"):
        prompts(made(tmp_path, template), tmp_path, {"prompt": [ASKED, turn]})


SILENT = (
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    + TEMPLATE.partition("{% for m in messages %}")[2]
)
DEAF = SILENT.replace("{% for c in m.tool_calls or [] %}", "{% for c in [] %}")


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (
            SILENT,
            [{"role": "developer", "content": "Be brief."}, ASKED],
            "content of message 1, role developer: “Be brief.”",
        ),
        (
            SILENT,
            [ASKED, calling("{}"), {"role": "tool", "content": "wet"}],
            "content of message 3, role tool: “wet”",
        ),
        (DEAF, [ASKED, calling("{}")], "call of message 2, role assistant: “weather”"),
        (
            TEMPLATE,
            [ASKED, {"role": "assistant", "content": "a", "thinking": "hm"}],
            "thinking of message 2, role assistant: “hm”",
        ),
        (TEMPLATE, [{"role": "developer", "content": "Be brief."}, ASKED, calling("{}")], ""),
    ],
)
def test_what_no_template_writes_is_said(template: str, messages: Any, words: str, tmp_path: Path) -> None:
    chat = [
        *messages,
        *([] if messages[-1]["role"] == "assistant" else [{"role": "assistant", "content": "It rains."}]),
    ]
    tokenizer = made(tmp_path, template)
    found = load(tokenizer, tmp_path, {"messages": chat})
    told = check_rows(convert({"algorithm": "sft"}), found, [], tokenizer, is_scored=False)
    assert [text.partition("(")[2].partition(")")[0] for text in told if "does not write" in text] == [
        words
    ] * bool(words)
    if chat[-1] not in messages:
        assert prompts(tokenizer, tmp_path, {"prompt": messages}).unshown == {("", 1): words}


def test_tools_that_no_template_shows_are_said(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, TEMPLATE.partition("{% endfor %}")[2])
    assert load(tokenizer, tmp_path, {"messages": [ASKED, calling("{}")], "tools": [TOOL]}).unshown == {}
    found = prompts(tokenizer, tmp_path, {"prompt": "Ulm?"}, {"prompt": "Ulm?", "tools": [TOOL]})
    assert found.unshown == {("", 2): "tool weather"}


def test_calls_as_they_were_are_read(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    call = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Ulm"}'},
    }
    chat = [
        ASKED,
        call,
        {"role": "function", "name": "weather", "content": "wet"},
        {"role": "assistant", "content": "It rains."},
    ]
    (example,) = load(tokenizer, tmp_path, {"messages": chat}).take(0, 1)
    assert trained(tokenizer, example) == [
        '<call>weather {"city": "Ulm"}</call><|im_end|>',
        "It rains.<|im_end|>",
    ]
    text = tokenizer.decode(example.targets[0].tokens.tolist(), skip_special=False)
    assert "<|im_start|>tool\nwet<|im_end|>" in text


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_chats_as_json_in_a_text_are_read(name: str, tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    turns = [ASKED, {"role": "assistant", "content": "No", "weight": 0}, ASKED, calling({"city": None})]
    table = pyarrow.table({"messages": [json.dumps(turns)], "prompt": [json.dumps([ASKED])]})
    if name == "rows.jsonl":
        (tmp_path / name).write_text(json.dumps(table.to_pylist()[0]))
    else:
        write_table = csv.write_csv if name == "rows.csv" else parquet.write_table
        write_table(table, tmp_path / name)
    data = {"train": name, "shuffle": False}
    found = load_train(convert({"algorithm": "sft", "data": data}), tokenizer, tmp_path)
    assert isinstance(found, TargetDataset) and found.form == "messages"
    (span,) = trained(tokenizer, found.take(0, 1)[0])
    assert span == '<call>weather {"city": null}</call><|im_end|>'
    (asked,) = load_data(name, "train", Data(), tokenizer, 0, tmp_path).take(0, 1)
    assert asked.prompt == "<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["[1, 2]", "[]", "[{}]", '["role"]', '[{"role": 1', " 2+2? "])
def test_other_texts_stay_texts(text: str, tmp_path: Path) -> None:
    (example,) = prompts(made(tmp_path), tmp_path, {"prompt": text}).take(0, 1)
    assert example.prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert chat_in("[" * 90_000) == "[" * 90_000


CONCATENATING = TEMPLATE.replace("c.function.arguments | tojson", "c.function.arguments + ''")


@pytest.mark.parametrize("arguments", [{"city": "Ülm"}, '{"city": "Ülm"}'])
@pytest.mark.parametrize("template", [TEMPLATE, CONCATENATING], ids=["object", "text"])
def test_arguments_are_what_the_template_reads(template: str, arguments: Any, tmp_path: Path) -> None:
    tokenizer = made(tmp_path, template)
    found = load(tokenizer, tmp_path, {"messages": [ASKED, calling(arguments)]})
    assert trained(tokenizer, found.take(0, 1)[0]) == ['<call>weather {"city": "Ülm"}</call><|im_end|>']


OPENING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def test_thoughts_that_a_prompt_opens_are_left_out(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, OPENING.replace("m.content or ''", "(m.content or '').split('</think>')[-1]"))
    answer = {"role": "assistant", "content": "<think>hm</think>It rains."}
    found = load(tokenizer, tmp_path, {"messages": [ASKED, answer, ASKED, answer]})
    (example,) = found.take(0, 1)
    assert trained(tokenizer, example) == ["It rains.<|im_end|>"] * 2
    assert example.prompt == "<|im_start|>user\nUlm?<|im_end|>\n<|im_start|>assistant\n"
    assert found.unshown == {("", 1): "thinking of message 4, role assistant: “hm”"}
    (asked,) = prompts(tokenizer, tmp_path, {"prompt": [ASKED]}).take(0, 1)
    assert asked.prompt.endswith("<|im_start|>assistant\n<think>\n")
