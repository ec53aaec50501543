"""The published clients of OpenAI and Anthropic at the door: each dialect is the same chat."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError
from openai import OpenAI

from tests.driver.episodes.test_door_tools import CALL, TOOLS, USER, Spoken

SCHEMA: Any = TOOLS[0]["function"]
OF_RESPONSES: Any = [{"type": "function", "strict": None, **SCHEMA}]
OF_MESSAGES: Any = [{"name": "add", "input_schema": SCHEMA["parameters"]}]


@pytest.fixture
def spoken(tmp_path: Path) -> Iterator[Spoken]:
    made = Spoken(tmp_path, "let me see " + CALL, "2", "three")
    yield made
    made.close()


@pytest.fixture
def openai(spoken: Spoken) -> Iterator[OpenAI]:
    with OpenAI(base_url=spoken.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic(spoken: Spoken) -> Iterator[Anthropic]:
    with Anthropic(base_url=spoken.url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        yield client


def rows_of_a_chat(directory: Path) -> list[list[int]]:
    """The contexts of the same turns by OpenAI's chat."""
    directory.mkdir()
    spoken = Spoken(directory, "let me see " + CALL, "2")
    system = {"role": "system", "content": "Add."}
    called = spoken.ask(system, USER, tools=TOOLS)["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "2"}
    spoken.ask(system, USER, called, result, tools=TOOLS)
    spoken.close()
    return spoken.heard


@pytest.mark.parametrize("is_stream", [False, True])
def test_responses_are_the_same_chat(spoken: Spoken, openai: OpenAI, tmp_path: Path, is_stream: bool) -> None:
    def ask(said: Any) -> Any:
        about: Any = {"model": "any", "instructions": "Add.", "input": said, "tools": OF_RESPONSES}
        if not is_stream:
            return openai.responses.create(**about)
        with openai.responses.stream(**about) as stream:
            return stream.get_final_response()

    first = ask([USER])
    message, call = first.output
    assert message.content[0].text == "let me see " and json.loads(call.arguments) == {"a": 1}
    sent_back = [each.model_dump(exclude_none=True) for each in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    last = ask([USER, *sent_back, result])
    assert last.output_text == "2" and last.status == "completed"
    assert last.usage.input_tokens == len(spoken.heard[1])
    assert spoken.heard == rows_of_a_chat(tmp_path / "chat") and spoken.chains.rows().forks == ()


@pytest.mark.parametrize("is_stream", [False, True])
def test_messages_are_the_same_chat(
    spoken: Spoken, anthropic: Anthropic, tmp_path: Path, is_stream: bool
) -> None:
    def ask(*said: Any) -> Any:
        about: Any = {"model": "any", "system": "Add.", "messages": [*said], "tools": OF_MESSAGES}
        if not is_stream:
            return anthropic.messages.create(max_tokens=64, **about)
        with anthropic.messages.stream(max_tokens=64, **about) as stream:
            return stream.get_final_message()

    first = ask(USER)
    text, call = first.content
    assert (text.text, call.input, first.stop_reason) == ("let me see ", {"a": 1}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    sent_back = [block.model_dump(exclude_none=True) for block in first.content]
    last = ask(USER, {"role": "assistant", "content": sent_back}, {"role": "user", "content": [result]})
    assert last.content[0].text == "2" and last.stop_reason == "end_turn"
    assert last.usage.input_tokens == len(spoken.heard[1])
    assert spoken.heard == rows_of_a_chat(tmp_path / "chat") and spoken.chains.rows().forks == ()


def test_tokens_are_counted_before_they_are_read(spoken: Spoken, anthropic: Anthropic) -> None:
    said: Any = {"model": "any", "system": "Add.", "messages": [USER]}
    counted = anthropic.messages.count_tokens(**said).input_tokens
    assert spoken.heard == []
    assert anthropic.messages.create(max_tokens=9, **said).usage.input_tokens == counted


def test_a_long_prompt_is_known_by_words(spoken: Spoken, anthropic: Anthropic) -> None:
    spoken.visit.max_tokens = 70
    with pytest.raises(BadRequestError, match="prompt is too long: ") as refused:
        anthropic.messages.create(
            model="any", max_tokens=9, messages=[{"role": "user", "content": "1+" * 50}]
        )
    assert refused.value.type == "invalid_request_error" and spoken.visit.refused == "tokens"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("responses", {"input": "1", "previous_response_id": "r"}, "Nothing is stored"),
        (
            "responses",
            {"input": "1", "tools": [{"type": "web_search"}]},
            "alone, and no web_search",
        ),
        ("responses", {"input": [{"type": "item_reference", "id": "r"}]}, "has no item_reference"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text alone"),
        ("responses", {"input": "1", "temperature": 0.1}, "temperature: the episode is sampled with 1"),
        ("responses", {"input": 1}, "input: give a text, or a list of items"),
        ("messages", {"messages": 1}, "messages: give a list"),
        ("messages", {"messages": [USER], "stop_sequences": ["x"]}, "stop: "),
        ("messages", {"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice: 'any'"),
        ("messages", {"messages": [USER], "tools": [{"type": "bash_20250124"}]}, "no bash_20250124"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks of image"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
    ],
)
def test_what_a_chat_has_not_is_refused(spoken: Spoken, path: str, body: dict[str, Any], says: str) -> None:
    assert asyncio.run(refusal(f"{spoken.url}/{path}", body)).find(says) >= 0
    assert spoken.heard == []


async def refusal(url: str, body: dict[str, Any]) -> str:
    from aiohttp import ClientSession

    async with ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 400
        return str((await answer.json())["error"]["message"])
