"""Tools through the gateway. The model says what it samples; its tokenizer makes calls of these tokens."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from lorad.rl.tokenizer import Tokenizer
from tests.kit.gateway_kit import World, entry, write_table
from tests.kit.pool_kit import TINY

pytest_plugins = ["tests.kit.gateway_fixtures"]

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.key }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
TOOL: Any = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "get", "arguments": {"key": "b"}}</tool_call>'
PIECES = ["Hm ", *(CALL[place : place + 25] for place in range(0, len(CALL), 25))]
SHOWN, HIDDEN = "get: x", "x"  # the prompt with and without the tool


class Speaker:
    """Has the model say what a test wants to read."""

    def __init__(self, client: OpenAI, world: World, directory: Path) -> None:
        self._client, self._world, self._directory = client, world, directory

    def says(self, pieces: Sequence[str], prompt: str = SHOWN) -> None:
        """From now on the tokens that it samples after the prompt are these pieces of text, and an end."""
        self._serve(TINY)
        known = set(Tokenizer(TINY).encode(prompt)) | {0, 1, 2}
        for self.seed in range(1000):
            ids = self._sampled(prompt, len(pieces) + 1)
            if len(set(ids) - known) == len(pieces) + 1:
                break
        self._serve(self._renamed(dict(zip(ids, pieces, strict=False)), ids[-1]))

    def _sampled(self, prompt: str, count: int) -> list[int]:
        more: Any = {"return_token_ids": True}
        made: Any = self._client.completions.create(
            model="bot", prompt=prompt, seed=self.seed, max_tokens=count, temperature=2, extra_body=more
        )
        ids: list[int] = made.choices[0].token_ids
        return ids

    def _renamed(self, texts: dict[int, str], end: int) -> Path:
        shutil.copytree(TINY, self._directory, dirs_exist_ok=True)
        path = self._directory / "tokenizer.json"
        made = json.loads(path.read_text())
        vocab = made["model"]["vocab"]
        made["model"]["vocab"] = {texts.get(number, text): number for text, number in vocab.items()}
        path.write_text(json.dumps(made))
        (self._directory / "chat_template.jinja").write_text(TEMPLATE)
        (self._directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        return self._directory

    def _serve(self, directory: Path) -> None:
        served = entry(
            self._world.running, self._world.root, self._world.versions[0], model_path=str(directory)
        )
        write_table(self._world.home, {"bot": "sorter@0"}, {"sorter@0": served})

    def asked(self, content: str = "x", **more: Any) -> Any:
        asked: dict[str, Any] = {"tools": [TOOL], "messages": [{"role": "user", "content": content}]} | more
        return self._client.chat.completions.create(model="bot", seed=self.seed, temperature=2, **asked)


@pytest.fixture
def speaker(client: OpenAI, world: World, tmp_path: Path) -> Speaker:
    return Speaker(client, world, tmp_path / "model")


def test_calls_are_told_from_text(speaker: Speaker) -> None:
    speaker.says(PIECES)
    choice = speaker.asked().choices[0]
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get")
    assert json.loads(call.function.arguments) == {"key": "b"}
    assert (choice.message.content, choice.finish_reason) == ("Hm ", "tool_calls")


@pytest.mark.system
def test_a_stream_has_the_calls_of_the_whole(speaker: Speaker) -> None:
    speaker.says(PIECES)
    chunks = [chunk.choices[0] for chunk in speaker.asked(stream=True, logprobs=True)]
    texts = "".join(chunk.delta.content or "" for chunk in chunks)
    [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (texts, call.index, call.function.name) == ("Hm ", 0, "get")
    assert json.loads(call.function.arguments) == {"key": "b"} and call.id
    assert chunks[-1].finish_reason == "tool_calls"
    logprobs = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content]
    assert [token.token for token in logprobs[:-1]] == PIECES


@pytest.mark.system
def test_parallel_calls_can_be_refused(speaker: Speaker) -> None:
    speaker.says([CALL, f" {CALL}"])
    choice = speaker.asked().choices[0]
    assert (len(choice.message.tool_calls), choice.message.content) == (2, None)
    assert len(speaker.asked(parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_a_call_that_cannot_be_read_stays_text(speaker: Speaker) -> None:
    speaker.says(["Hm ", "<tool_call>{", "</tool_call>"])
    for choice in (speaker.asked().choices[0], speaker.asked(max_tokens=3).choices[0]):
        assert (choice.message.content, choice.message.tool_calls) == ("Hm <tool_call>{</tool_call>", None)
    assert choice.finish_reason == "length"


def test_without_choice_no_tool_is_shown(speaker: Speaker) -> None:
    speaker.says(["No ", CALL], prompt=HIDDEN)
    without: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for more in without:
        choice = speaker.asked(**more).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (f"No {CALL}", None)


def test_calls_and_their_results_are_read_back(speaker: Speaker) -> None:
    speaker.says(["a"])
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"key": "b"}'}}
    messages = [
        {"role": "user", "content": "7 "},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": " 3"},
    ]
    answer = speaker.asked(messages=messages, max_tokens=2)
    assert answer.usage.prompt_tokens == len("get: 7 <tool_call>b</tool_call> 3")
    call["function"] = {"name": "get", "arguments": "{"}
    with pytest.raises(sdk.BadRequestError, match="the arguments of get are no JSON"):
        speaker.asked(messages=messages)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_no_model_can_promise_is_refused(speaker: Speaker, more: dict[str, Any], param: str) -> None:
    speaker.says(["a"])
    with pytest.raises(sdk.BadRequestError) as caught:
        speaker.asked(**more)
    assert caught.value.param == param


def test_a_model_without_tools_refuses_them(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "7"}]
    results: Any = [{"role": "tool", "content": "3"}]
    for more, param in (({"tools": [TOOL]}, "tools"), ({"messages": results}, "messages")):
        asked: Any = {"messages": messages} | more
        with pytest.raises(sdk.BadRequestError, match="has no tools") as caught:
            client.chat.completions.create(model="bot", **asked)
        assert caught.value.param == param
