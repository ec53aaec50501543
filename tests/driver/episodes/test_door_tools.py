"""Chats with calls of tools, through the door: what a client sends back continues the tokens as they were."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorad.driver.door.chains import Chains
from lorad.driver.door.chat import Chat, DoorRefusal, decoded
from lorad.driver.door.door import Door, Visit
from lorad.envs.format import Format
from lorad.protocol.batch import Chunk, Sampling
from lorad.rl.tokenizer import Tokenizer
from lorad.spec.model import convert
from tests.rl.test_chat_templates import write

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
TEMPLATE = """
{%- if tools %}system: call <tool_call>{name, arguments}</tool_call> of {{ tools | tojson }}</s>{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>
{%- endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
CALL = '<tool_call>\n{"name":"add",  "arguments": {"a": 1}}\n</tool_call>'  # not as the template writes it
USER = {"role": "user", "content": "1+1?"}


class Spoken:
    """A door whose model says what the test wrote."""

    def __init__(self, directory: Path, *turns: str) -> None:
        made = write(directory, TEMPLATE)
        self.tokenizer, self.turns, self.heard = Tokenizer(made), turns, list[list[int]]()
        spec = convert({"data": {"train": "rows.jsonl"}, "env": {"name": "agent.py:run"}})
        self.chains = Chains(Format(spec, self.tokenizer))
        self.visit = Visit(
            chains=self.chains,
            version="run@3",
            how=Sampling(64),
            turns=4,
            max_tokens=100_000,
            form=self.tokenizer.call_form,
            speak=self._speak,
            text_of=self.tokenizer.with_calls,
        )
        self._threads = ThreadPoolExecutor(2)
        self.door = Door(self._threads)
        self.url = self.door.let_in(self.visit)

    def _speak(self, context: list[int], turn: int, most: int) -> list[Chunk]:
        self.heard.append(context)
        tokens = np.array(self.tokenizer.encode(self.turns[turn] + "</s>"), np.int32)
        return [Chunk("0", 0, "run@3", tokens, np.zeros(tokens.size, np.float32), "stop")]

    def ask(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        body = json.dumps({"messages": messages, "model": "any", **more}).encode()
        request = urllib.request.Request(self.url + "/chat/completions", body)
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)["choices"][0]
        return found

    def close(self) -> None:
        self.door.close()
        self._threads.shutdown()
        self.tokenizer.close()


@pytest.fixture
def spoken(tmp_path: Path) -> Iterator[Spoken]:
    made = Spoken(tmp_path, "let me see " + CALL, "2", "three")
    yield made
    made.close()


def test_results_of_tools_continue_the_tokens(spoken: Spoken) -> None:
    called = spoken.ask(USER, tools=TOOLS)
    (call,) = called["message"]["tool_calls"]
    assert called["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"]) == {"a": 1}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    last = spoken.ask(USER, called["message"], result, tools=TOOLS)
    assert last["message"]["content"] == "2" and last["finish_reason"] == "stop"
    first, second = spoken.heard
    said = spoken.tokenizer.encode("let me see " + CALL + "</s>")
    assert second[: len(first) + len(said)] == first + said
    text = spoken.tokenizer.decode(second[len(first) + len(said) :], skip_special=False)
    assert text == "tool: 2</s>assistant: "
    rows = spoken.chains.rows()
    assert rows.forks == () and rows.sampled.sum() == len(said) + len(spoken.tokenizer.encode("2</s>"))


def test_other_tools_begin_a_row(spoken: Spoken) -> None:
    called = spoken.ask(USER, tools=TOOLS)
    spoken.ask(USER, called["message"], USER)
    rows = spoken.chains.rows()
    assert len(rows.forks) == 1 and [turn.row for turn in rows.turns] == [0, 1]
    assert rows.forks[0].prompt == spoken.heard[1] and rows.forks[0].at == rows.turns[0].tokens


def test_branches_share_tokens_and_not_rows(spoken: Spoken) -> None:
    called = spoken.ask(USER)
    more = [USER, called["message"]]
    spoken.ask(*more, {"role": "user", "content": "and?"})
    spoken.ask(*more, {"role": "user", "content": "or?"})
    rows = spoken.chains.rows()
    assert [turn.row for turn in rows.turns] == [0, 0, 1]
    shared = len(spoken.heard[0]) + rows.turns[0].tokens
    assert spoken.heard[2][:shared] == spoken.heard[1][:shared] == rows.forks[0].prompt[:shared]


class Meeting(list[dict[str, Any]]):
    """No tools; whoever first looks whether there are any waits for the other request to look too."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both: threading.Barrier | None = both

    def __bool__(self) -> bool:
        both, self._both = self._both, None
        if both is not None:
            both.wait(10)
        return False


def test_requests_at_once_share_the_turns(spoken: Spoken) -> None:
    spoken.visit.turns_begun, spoken.turns = 3, ("1", "2", "3", "4", "5")
    both = threading.Barrier(2)
    chats = [Chat([USER], Meeting(both), 8, is_stream=False, wants_usage=False) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(spoken.visit.answer, chat) for chat in chats]
        errors = [future.exception() for future in futures]
    assert sum(isinstance(error, DoorRefusal) for error in errors) == 1 and None in errors
    assert len(spoken.heard) == 1 and spoken.visit.turns_begun == spoken.visit.turns == 4


def test_an_episode_that_is_over_answers_nobody(spoken: Spoken) -> None:
    spoken.door.send_away(spoken.visit)
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        spoken.ask(USER)
    refused.value.close()
    assert spoken.heard == []


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(DoorRefusal, match="no JSON object"):
        decoded(b'{"messages": "\xff"}')
