"""Turns observations into tokens, which only grow in an episode: none is made twice from text."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lorad.envs.protocol import Message, Turn
from lorad.errors import SpecError
from lorad.rl.rows.messages import with_system
from lorad.rl.tasks import TASKS
from lorad.rl.templates import Refused
from lorad.rl.tokenizer import Tokenizer, refusal
from lorad.rl.tools.parsing import parse
from lorad.spec.data import single
from lorad.spec.model import Spec

Tools = Sequence[Mapping[str, Any]]  # in OpenAI's wrapped form
_TURN = "lorad turn"
_DUMMY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _TURN}]
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {_TURN: 1}}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TEXT = "Name a renderer in env.format, such as qwen3.5 (lorad[envs]), or text: observations as they are."


class Format:
    """How the observations of a run become tokens.

    Behind the model's turn a chat template adds what it writes behind the end token of a made-up turn; the
    tokens before it stay as they were sampled.
    """

    def __init__(self, spec: Spec, tokenizer: Tokenizer) -> None:
        """Raises SpecError where the chat template does not say what follows a turn."""
        self._tokenizer = tokenizer
        self._data = spec.data
        self._stops = spec.rollout.stop
        has_template = tokenizer.has_chat_template and spec.data.chat_template == "auto"
        has_template = has_template and single(spec.data.train) not in TASKS  # whose prompts are plain text
        self.is_chat = spec.env.format == "chat" or (spec.env.format == "auto" and has_template)
        self._ends = {number: tokenizer.decode([number], skip_special=False) for number in tokenizer.eos_ids}
        self._end = self._behind("a")[1] if self.is_chat else -1

    def first(self, messages: str | Sequence[Message], tools: Tools = ()) -> tuple[str, list[int]]:
        """Return (text, tokens) of the first observation, with the model's tools. Raises SpecError."""
        if tools and not self.is_chat:
            raise SpecError(
                "the environment has tools, and only a chat template shows them to the model",
                key="env.format",
                hint="Use a model with a chat template, and leave env.format and data.chat_template at auto.",
            )
        if tools and self._tokenizer.call_form is None:
            raise SpecError(
                "the environment has tools, and the chat template shows none in a form that lorad reads",
                key="env.name",
                hint="Use a model that calls tools, such as Qwen3, or a chat template with tools.",
            )
        if tools and not self._shows_results:
            raise SpecError(
                "the chat template does not show what a tool answers",
                key="env.format",
                hint="Name a renderer in env.format, such as qwen3.5 (lorad[envs]).",
            )
        if self.is_chat:
            chat = with_system(self._data, chat_of(messages))
            text = self._tokenizer.chat(chat, self._settings(tools), continues=True)
            return text, self._tokenizer.encode(text)
        text = _text(messages)
        return text, self._tokenizer.encode(text, special=True)

    def turn(self, tokens: Sequence[int], finish: str, tools: Tools = ()) -> Turn:
        """Return the model's turn of these tokens."""
        text = self._tokenizer.completion(tokens, self._stops, calls=bool(tools))
        form = self._tokenizer.call_form
        calls = parse(text, form, tools).calls if form and tools else []
        return Turn(text, finish, tuple(calls))

    def ends_turn(self, token: int) -> bool:
        """Return whether something can follow a turn that ends with this token."""
        return not self.is_chat or token == self._end

    def following(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        before: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> list[int]:
        """Return the tokens between a turn of the model and the next. Raises SpecError.

        before: What the model has read, and its last turn, which renderers may look at.
        """
        if not self.is_chat:
            return self._tokenizer.encode(_text(messages))
        return self._tokenizer.encode(self._behind(messages, tools)[0])

    def _behind(self, messages: str | Sequence[Message], tools: Tools = ()) -> tuple[str, int]:
        """Return the template's text behind the end token of a made-up turn, and that token."""
        chat = chat_of(messages)
        has_results = any(message.get("role") == "tool" for message in chat)
        for is_call in (False, True):
            turns = [_DUMMY[0], _CALLS] if is_call else _DUMMY
            try:
                text = self._tokenizer.chats([[*turns, *chat]], self._settings(tools))[0]
                break
            except Refused as error:  # also by templates that want results behind calls alone
                if is_call or not has_results:
                    raise refusal(error, "an observation") from error
        _, turn, rest = text.partition(_TURN)
        ends = [(rest.find(end), number) for number, end in self._ends.items() if turn and end in rest]
        if not ends or (not is_call and rest[: min(ends)[0]].strip()):
            turn_or_call = "a call of a tool" if is_call else "the assistant's turn"
            raise SpecError(
                f"the chat template ends {turn_or_call} with no end token of the model",
                key="env.format",
                hint=_TEXT,
            )
        place, number = min(ends)
        return rest[place + len(self._ends[number]) :], number

    @cached_property
    def _shows_results(self) -> bool:
        return _TURN in self._behind([{"role": "tool", "name": "f", "content": _TURN}])[0]

    def _settings(self, tools: Tools) -> dict[str, Any]:
        return {**self._data.chat_template_kwargs, **({"tools": [*tools]} if tools else {})}


def chat_of(messages: str | Sequence[Message]) -> list[Message]:
    """Return messages; a text becomes a user's message."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]


def _text(messages: str | Sequence[Message]) -> str:
    """Return a text itself. Raises SpecError for messages, which need a chat template."""
    if isinstance(messages, str):
        return messages
    raise SpecError(
        "the environment answers with chat messages, and nothing renders them",
        key="env.format",
        hint="Use a model with a chat template, or answer with text.",
    )
