"""Tools: their descriptions, and calls in what models write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from lorad.errors import SpecError
from lorad.rl.tokenizer import Tokenizer
from lorad.rl.tools.calls import CallForm, form_of
from lorad.rl.tools.parsing import Splitter, parse
from lorad.rl.tools.specs import tool_of, wrapped, wrapped_all
from tests.rl.test_chat_templates import write

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"


def look_up(key: str, depth: int = 1, kind: Literal["near", "far"] = "near") -> str:
    """Find the value
    of a key.

    Args:
        key: what to look
            for
        depth (int): how deep
    Returns:
        the value
    """
    raise NotImplementedError


TOOLS = [tool_of(look_up)]
GOOD: list[tuple[CallForm, str]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "look_up", "arguments": {"key": "a</tool_call>", "depth": 2}}\n</tool_call>',
    ),
    ("hermes", '<tool_call>{"name":"look_up","arguments":"{\\"key\\":\\"a</tool_call>\\",\\"depth\\":2}"}'),
    ("llama", '<|python_tag|>{"name": "look_up", "parameters": {"key": "a</tool_call>", "depth": 2}}'),
    ("llama", '\n{"name": "look_up", "parameters": {"key": "a</tool_call>", "depth": 2}}'),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"key": "a</tool_call>", "depth": 2}, "id": "x"}]',
    ),
    ("mistral", '[TOOL_CALLS]look_up[ARGS]{"key": "a</tool_call>", "depth": 2}'),
]
OTHER: list[tuple[CallForm, str]] = [
    (
        "xml",
        "<tool_call>\n<function=look_up>\n<parameter=key>\n12\n</parameter>\n<parameter=depth>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    ("xml", "<function=look_up><parameter=key>12</parameter><parameter=depth>2</parameter></function>"),
    (
        "glm",
        "<tool_call>look_up\n<arg_key>key</arg_key>\n<arg_value>12</arg_value>\n<arg_key>depth</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
    ),
]


def test_a_function_describes_itself_as_a_tool() -> None:
    function = tool_of(look_up)["function"]
    assert (function["name"], function["description"]) == ("look_up", "Find the value of a key.")
    assert function["parameters"]["required"] == ["key"]
    assert function["parameters"]["properties"] == {
        "key": {"type": "string", "description": "what to look for"},
        "depth": {"type": "integer", "description": "how deep"},
        "kind": {"type": "string", "enum": ["far", "near"]},
    }


def test_a_description_is_wrapped_once() -> None:
    plain = {"name": "a", "parameters": {"type": "object"}}
    assert wrapped(plain) == wrapped(wrapped(plain)) == {"type": "function", "function": plain}


@pytest.mark.parametrize(
    "given", [{"name": "a b"}, {"type": "retrieval"}, {"name": "a", "parameters": 1}, lambda x: x]
)
def test_what_is_no_tool_is_refused(given: Any) -> None:
    with pytest.raises(SpecError):
        wrapped_all([given])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match="two tools have the name look_up"):
        wrapped_all([look_up, *TOOLS])


@pytest.mark.parametrize(("form", "text"), GOOD + OTHER)
def test_calls_are_read_in_every_form(form: CallForm, text: str) -> None:
    said = parse(text, form, TOOLS)
    key = "12" if (form, text) in OTHER else "a</tool_call>"
    assert [(call.name, call.arguments, call.outcome) for call in said.calls] == [
        ("look_up", {"key": key, "depth": 2}, "ok")
    ]
    assert not said.text.strip()


def test_several_calls_and_the_text_around_them() -> None:
    one = GOOD[0][1]
    said = parse(f"First:\n{one}\n{one}\nDone.", "hermes", TOOLS)
    assert (len(said.calls), said.text) == (2, "First:\n\nDone.")
    assert len(parse(f"{GOOD[2][1]}; {GOOD[3][1].strip()}", "llama", TOOLS).calls) == 2


@pytest.mark.parametrize(
    ("form", "text", "outcome", "says"),
    [
        ("hermes", '<tool_call>{"name": "look_up", </tool_call> more', "invalid_json", "it is no JSON"),
        ("hermes", '<tool_call>{"name": "look_up"', "invalid_json", "it is no JSON"),
        ("hermes", '<tool_call>{"name": "look_up"}{}</tool_call>', "invalid_json", "more behind its JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "invalid_json", 'no "name"'),
        (
            "hermes",
            '<tool_call>{"name": "look_up", "arguments": [1]}</tool_call>',
            "invalid_json",
            "no JSON object",
        ),
        (
            "hermes",
            '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
            "unknown_tool",
            "there are: look_up",
        ),
        ("llama", '{"name": "look_up", "parameters": {', "invalid_json", "it is no JSON"),
        ("mistral", "[TOOL_CALLS] [{]", "invalid_json", "it is no JSON"),
        ("xml", "<tool_call>look_up</tool_call>", "invalid_json", "<function=name>"),
        (
            "xml",
            "<function=look_up><parameter=depth>deep</parameter></function>",
            "invalid_json",
            "depth of look_up",
        ),
        ("glm", "<tool_call>fly</tool_call>", "unknown_tool", "there is no tool 'fly'"),
    ],
)
def test_a_bad_call_says_what_is_wrong(form: CallForm, text: str, outcome: str, says: str) -> None:
    [call] = parse(text, form, TOOLS).calls
    assert call.outcome == outcome
    assert says in call.error
    assert call.written in text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<think>I could write <tool_call>{} here</think>Hello"),
        ("hermes", "<think><tool_call>{}"),
        ("llama", '{"answer": 3}'),
        ("llama", 'I call {"name": "look_up", "parameters": {}}'),
    ],
)
def test_what_is_no_call_stays_text(form: CallForm, text: str) -> None:
    said = parse(text, form, TOOLS)
    assert (said.text, said.calls) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [*GOOD, *OTHER, ("hermes", "a <tool"), ("hermes", f"Hi <t {GOOD[0][1]} bye"), ("llama", "Hello {}")],
)
def test_a_stream_is_split_as_the_whole(form: CallForm, text: str) -> None:
    for size in (1, 3, 1000):
        splitter = Splitter(form, TOOLS)
        shown = [splitter.add(text[place : place + size]) for place in range(0, len(text), size)]
        rest, whole = splitter.rest(), parse(text, form, TOOLS)
        assert ("".join(shown) + rest.text, rest.calls) == (whole.text, whole.calls)
        assert not any("look_up" in part for part in shown)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{{ tools }}", "hermes"),
        ("{% if tools %}<tool_call><function=x>", "xml"),
        ("{% if tools %}<tool_call>x<arg_key>", "glm"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ('{{ tools }}Respond in the format {"name": function name, "parameters": …', "llama"),
        ("{{ tools }}", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str | None, form: str | None) -> None:
    assert form_of(template) == form


def rendered(tmp_path: Path, template: str, messages: Sequence[dict[str, Any]]) -> str:
    tokenizer = Tokenizer(write(tmp_path, template))
    text = tokenizer.chat(messages, {"tools": TOOLS})
    tokenizer.close()
    return text


def test_arguments_reach_templates_as_objects(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v|tojson }}{% endfor %}{% endfor %}"
        "{{ m.content }};{% endfor %}{{ tools[0].function.name }}"
    )
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look_up", "arguments": json.dumps({"key": "é"})},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "<tool_call>{}</tool_call>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    text = rendered(tmp_path, template, messages)
    assert text == 'user:<tool_call>{}</tool_call>;assistant:look_upkey="é";tool:3;look_up'
    call["function"] = {"name": "look_up", "arguments": "{"}
    with pytest.raises(SpecError, match="the arguments of look_up are no JSON"):
        rendered(tmp_path, template, messages)


def test_marks_of_calls_survive_decoding(tmp_path: Path) -> None:
    path = write(tmp_path, "{{ tools }}[TOOL_CALLS]") / "tokenizer.json"
    made = json.loads(path.read_text())
    made["added_tokens"].append({**made["added_tokens"][0], "id": 300, "content": "[TOOL_CALLS]"})
    path.write_text(json.dumps(made))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("[TOOL_CALLS] [{}]</s>")
    assert tokenizer.decode(ids) == " [{}]"
    assert tokenizer.with_calls(ids) == "[TOOL_CALLS] [{}]"
