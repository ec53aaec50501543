"""Tools of environments: shown, called, answered; classes for TRL's environment_factory as they are."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorad.envs.child import EpisodeAnswer
from lorad.envs.format import Format
from lorad.envs.host import EnvironmentHost, HostedEpisode
from lorad.envs.protocol import Turn
from lorad.errors import SpecError
from lorad.records.episodes import Task, ToolCall
from lorad.rl.tokenizer import Tokenizer
from lorad.rl.tools.specs import wrapped_all
from lorad.spec.env import EnvSpec
from lorad.spec.model import convert
from tests.rl.test_chat_templates import write

ENVS = '''
import asyncio
from lorad.envs.protocol import Observation

class Counter:
    """As TRL documents an environment."""
    def __init__(self):
        self.asked = 0

    def reset(self, start=0, **kwargs) -> str | None:
        self.count = start
        return " Begin."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: how much to add
        """
        if step > 9:
            raise ValueError("too much")
        self.count += step
        return self.count

    async def wait(self, seconds: float = 0.0) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    async def get_reward(self) -> float:
        self.asked += 1
        return self.count + 100 * (self.asked - 1)

    def _hidden(self):
        pass

class Keeps(Counter):
    """Its reward is an attribute, which TRL's reward functions read."""
    get_reward = property()
    reward = 0.5

class Priced:
    """By lorad's own protocol."""
    def __init__(self):
        def price(item: str) -> str:
            """Say what an item costs."""
            return "3"
        self.tools = [price]

    def reset(self, row, seed):
        return Observation("What costs it? ")

    def step(self, turn):
        if turn.calls:
            return Observation([{"role": "tool", "content": str(len(turn.calls))}], 0.25)
        return Observation(None, 1.0)

    def at_limit(self):
        return -1.0

    def close(self):
        pass
'''
ROW = {"prompt": [{"role": "user", "content": "Count to 5."}], "start": 2}
ADD = ToolCall("increment", {"step": 3})


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "envs.py").write_text(ENVS)
    made = list[EnvironmentHost]()

    def make(name: str) -> EnvironmentHost:
        made.append(EnvironmentHost(EnvSpec(name=f"envs.py:{name}", workers=1), tmp_path))
        return made[-1]

    yield make
    for host in made:
        host.close()


def begun(host: EnvironmentHost) -> tuple[HostedEpisode, EpisodeAnswer]:
    [(heard, answer)] = host.begin([Task(ROW, 0)])
    assert not answer.error
    return heard, answer


def hears(host: EnvironmentHost, heard: HostedEpisode, *calls: ToolCall, text: str = "") -> EpisodeAnswer:
    heard.turns.append(Turn(text, "stop", calls))
    return host.answers([heard])[0]


def contents(answer: EpisodeAnswer) -> list[str]:
    assert isinstance(answer.messages, list) and not answer.error
    assert {message["role"] for message in answer.messages} == {"tool"}
    return [message["content"] for message in answer.messages]


def test_classes_for_trl_are_environments(hosts: Any) -> None:
    host = hosts("Counter")
    heard, answer = begun(host)
    assert answer.messages == [{"role": "user", "content": "Count to 5. Begin."}]
    assert [tool["function"]["name"] for tool in answer.tools] == ["increment", "wait"]
    assert answer.tools[0]["function"]["parameters"]["properties"]["step"]["description"] == "how much to add"
    assert contents(hears(host, heard, ADD, ToolCall("wait", {}))) == ["5", "waited"]
    over = hears(host, heard, text="It is 5.")
    assert (over.messages, over.reward) == (None, 5.0)


def test_a_reward_may_be_an_attribute(hosts: Any) -> None:
    host = hosts("Keeps")
    heard, _ = begun(host)
    assert hears(host, heard, text="done").reward == 0.5


def test_errors_of_tools_are_answers(hosts: Any) -> None:
    host = hosts("Counter")
    heard, _ = begun(host)
    found = hears(host, heard, ToolCall("increment", {"step": 10}), ToolCall("increment", {"by": 1}), ADD)
    first, second, third = contents(found)
    assert first == "{'error': 'too much'}" and "unexpected keyword argument 'by'" in second
    assert (third, found.tool_errors) == ("5", 2)


@pytest.mark.parametrize("name", ["Counter", "Priced"])
def test_malformed_calls_are_answered(hosts: Any, name: str) -> None:
    host = hosts(name)
    heard, _ = begun(host)
    bad = ToolCall("", None, "the call cannot be read: it is no JSON", "invalid_json")
    found = hears(host, heard, bad)
    assert contents(found) == ["{'error': 'the call cannot be read: it is no JSON'}"]
    assert (found.reward, found.tool_errors) == (0.0, 1)
    found = hears(host, heard, bad, ADD)
    assert len(contents(found)) == 2 and found.tool_errors == 1


@pytest.mark.parametrize(("name", "earned"), [("Counter", 5.0), ("Priced", -1.0)])
def test_a_limit_asks_what_was_earned(hosts: Any, name: str, earned: float) -> None:
    host = hosts(name)
    heard, answer = begun(host)
    assert answer.scores_at_limit
    hears(host, heard, ADD)
    for process in psutil.Process().children(recursive=True):  # a new process comes to the same
        with contextlib.suppress(psutil.NoSuchProcess):
            if "lorad.envs.child" in process.cmdline():
                process.kill()
    heard.at_limit = True
    assert host.answers([heard])[0].reward == earned


HERMES = """{% if tools %}<|im_start|>system
You may call: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = HERMES.replace("tool", "thing")


def form_of(directory: Path, template: str, form: str = "auto") -> tuple[Format, Tokenizer]:
    write(directory, template)
    (ends,) = Tokenizer(directory).encode("<|im_end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = Tokenizer(directory)
    spec = convert({"data": {"train": "rows.jsonl"}, "env": {"name": "e.py:E", "format": form}})
    return Format(spec, tokenizer), tokenizer


def get(key: str) -> str:
    """Look it up."""
    return key


TOOLS = wrapped_all([get])


def test_a_tool_episode_equals_its_chat(tmp_path: Path) -> None:
    form, tokenizer = form_of(tmp_path, HERMES)
    written = '<tool_call>\n{"name": "get", "arguments": {"key": "b"}}\n</tool_call>'
    chat: list[dict[str, Any]] = [{"role": "user", "content": "What is b?"}]
    text, tokens = form.first(chat, TOOLS)
    assert "Look it up." in text
    said = tokenizer.encode(written + "<|im_end|>")
    turn = form.turn(said, "stop", TOOLS)
    assert turn.calls[0].arguments == {"key": "b"} and turn.text == written
    result = {"role": "tool", "name": "get", "content": "7"}
    tokens += said + form.following([result])
    call = {"type": "function", "function": {"name": "get", "arguments": {"key": "b"}}}
    chat += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    assert tokens == tokenizer.encode(tokenizer.chat(chat, {"tools": TOOLS}))


@pytest.mark.parametrize(
    ("template", "form", "says", "key"),
    [
        (PLAIN, "auto", "shows none in a form that lorad reads", "env.name"),
        (HERMES, "text", "only a chat template shows them", "env.format"),
    ],
)
def test_tools_that_no_model_sees_are_refused(
    tmp_path: Path, template: str, form: str, says: str, key: str
) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        form_of(tmp_path, template, form)[0].first("What is b?", TOOLS)
    assert caught.value.key == key
