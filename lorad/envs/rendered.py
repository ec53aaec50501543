"""Turns chats into tokens by a renderer (`env.format: NAME`), where no template says what follows a turn.

The library `renderers` knows families of models token by token. It is imported where it is asked for.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lorad.envs.format import Format, Tools, chat_of
from lorad.envs.protocol import Message, Turn
from lorad.errors import SpecError
from lorad.records.episodes import ToolCall
from lorad.rl.rows.messages import with_system
from lorad.rl.tokenizer import Tokenizer
from lorad.rl.tools.specs import for_template
from lorad.spec.model import Spec

_OWN = ("auto", "text", "chat")
_LEFT_OUT = ("auto", "default", "custom")  # they need transformers, or code of somebody else's


def open_format(spec: Spec, tokenizer: Tokenizer) -> Format:
    """Return the format that `env.format` names. Raises SpecError."""
    return Format(spec, tokenizer) if spec.env.format in _OWN else _RendererFormat(spec, tokenizer)


class _RendererFormat(Format):
    """Extends tokens by a renderer. The model's thoughts stay, where the renderer can keep them."""

    def __init__(self, spec: Spec, tokenizer: Tokenizer) -> None:
        """Raises SpecError for an unknown renderer, or one that is not for this tokenizer."""
        self._tokenizer = tokenizer
        self._data = spec.data
        self._stops = spec.rollout.stop
        self.is_chat = True
        self._name = spec.env.format
        self._renderer = _renderer(spec, tokenizer)
        self._closes = frozenset(self._renderer.get_stop_token_ids())
        said = [*tokenizer.encode("a"), min(self._closes)]
        self._made_up = self.first("a")[1], said
        self.following("a")

    def first(self, messages: str | Sequence[Message], tools: Tools = ()) -> tuple[str, list[int]]:
        chat = for_template(with_system(self._data, chat_of(messages)))
        tokens = self._asked(self._renderer.render_ids, chat, tools, add_generation_prompt=True)
        return self._tokenizer.decode(tokens, skip_special=False), tokens

    def turn(self, tokens: Sequence[int], finish: str, tools: Tools = ()) -> Turn:
        text = self._tokenizer.completion(tokens, self._stops, calls=bool(tools))
        if not tools:
            return Turn(text, finish)
        said = self._renderer.parse_response([*tokens], tools=[*tools])
        names = sorted(tool["function"]["name"] for tool in tools)
        calls = list[ToolCall]()
        for parsed in said.tool_calls:
            name = parsed.name or ""
            arguments = parsed.arguments
            unreadable = ""
            if (status := str(parsed.status)) not in ("ok", "unknown_tool"):
                unreadable = f"the call cannot be read: {status}"
            elif isinstance(arguments, str | None):
                try:
                    arguments = json.loads(arguments or "{}")
                except ValueError as error:
                    unreadable = f"the arguments of {name} cannot be read: {error}"
            if unreadable:
                call = ToolCall(name, None, unreadable, "invalid_json", parsed.raw)
            elif name in names:
                call = ToolCall(name, arguments, written=parsed.raw)
            else:
                wrong = f"there is no tool {name!r}; there are: {', '.join(names)}"
                call = ToolCall(name, arguments, wrong, "unknown_tool", parsed.raw)
            calls.append(call)
        return Turn(text, finish, tuple(calls))

    def ends_turn(self, token: int) -> bool:
        return token in self._closes

    def following(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        before: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> list[int]:
        read, said = map(list, before if before[0] else self._made_up)
        extend = self._renderer.bridge_to_next_turn
        extended = self._asked(lambda new, **more: extend(read, said, new, **more), chat_of(messages), tools)
        size = len(read) + len(said)
        if extended is None or [*extended.token_ids[:size]] != read + said:
            raise SpecError(
                f"the renderer {self._name} cannot say what follows this turn",
                key="env.format",
                hint="The environment may begin a new row: Observation(…, replaces=True).",
            )
        return [*extended.token_ids[size:]]

    def _asked(self, ask: Callable[..., Any], chat: Sequence[Message], tools: Tools, **more: Any) -> Any:
        try:
            return ask([*chat], tools=[*tools] or None, **more)
        except Exception as error:  # of the library: any
            hint = "Check the roles of the messages; env.format: chat takes the chat template."
            raise SpecError(
                f"the renderer {self._name} refused the messages: {error}", key="env.format", hint=hint
            ) from error


class _Vocabulary:
    """A tokenizer as renderers use it."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.chat_template = tokenizer.template
        self.unk_token_id: int | None = None
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)
        self.pad_token_id = tokenizer.pad_id

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._tokenizer.encode(text, special=add_special_tokens)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        numbers = [ids] if isinstance(ids, int) else [*ids]
        return self._tokenizer.decode(numbers, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        look = self._tokenizer.number_of
        return look(tokens) if isinstance(tokens, str) else [look(token) for token in tokens]


def _renderer(spec: Spec, tokenizer: Tokenizer) -> Any:
    """Make the renderer of `env.format`. Raises SpecError."""
    name = spec.env.format
    settings = spec.data.chat_template_kwargs
    try:
        from renderers import configs, create_renderer
    except ImportError as error:
        raise SpecError(
            f"{name} would be a renderer, and the library is missing: {error}",
            key="env.format",
            hint='`pip install "lorad[envs]"`; without it there are auto, chat and text.',
        ) from None
    kinds: Mapping[str, Any] = configs._CONFIG_BY_NAME
    if name not in kinds or name in _LEFT_OUT:
        offered = ", ".join((*_OWN, *sorted(set(kinds) - set(_LEFT_OUT))))
        raise SpecError(f"there is no format {name!r}", key="env.format", hint=f"There are {offered}.")
    try:
        config = configs.config_from_name(name)
        # of what the model thought, nothing is taken away unless the spec says so
        keeps = {} if "thinking_retention" in settings else {"thinking_retention": "all"}
        vocabulary = _Vocabulary(tokenizer, spec.model.path)
        configured = type(config)(**keeps)
        return create_renderer(vocabulary, configured, chat_template_kwargs=settings)
    except Exception as error:  # of the library: any, also of assertions about the vocabulary
        raise SpecError(
            f"the renderer {name} is not for this model: {error}",
            key="env.format",
            hint="Name the renderer of the model's family, with its data.chat_template_kwargs.",
        ) from error
