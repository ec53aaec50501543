"""A model's tokenizer, read from its directory without transformers, and its chat template."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import tokenizers
from msgspec import structs

from lorad.bounds import JSON_BYTES, TEMPLATE_SECONDS
from lorad.errors import SpecError
from lorad.files import read_file
from lorad.rl.templates import Chat, ChatTemplate, Job, Refused, Renderer, settings_in, template_in
from lorad.rl.tools.calls import SPECIAL, form_of
from lorad.rl.tools.specs import for_template

_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_PARTS = [{"type": "text", "text": "lorad one"}, {"type": "text", "text": "lorad two"}]
_TURN = "lorad turn"
_FUNCTION = {"name": "f", "arguments": {"a": _TURN}}
_ASKED: dict[str, Any] = {"role": "user", "content": "a"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": _TURN}
_CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": _FUNCTION}],
}
_BEFORE = {"assistant": [_ASKED], "tool": [_ASKED, _CALLS]}  # messages before one of a role
_BEHIND = {"system": [_ASKED], "developer": [_ASKED]}
_ADVICE = (
    "check the roles of the messages, data.system and chat_template_kwargs, and the model's chat template"
)
_NAMED_TOKEN = re.compile(r"\b(?!eos_token)\w+_token\b")  # a variable of a template
_PATTERN = "its pre_tokenizer has a pattern that takes for ever: use the model's own tokenizer"


class Tokenizer:
    """Text <-> token ids.

    pad_id: The padding id of `generation_config.json`, `config.json` or `tokenizer_config.json`, else the
        first id that one of them ends completions with, else 0.
    call_form: How the model writes calls of tools; None when it has none, or lorad does not read its form.
    template: The text of the chat template; None without one.
    """

    def __init__(self, directory: Path, *, date: str | None = None) -> None:
        """Read a tokenizer, whose chat template takes `date`, in ISO 8601, for the present if there is one.

        Raises SpecError when `tokenizer.json` is missing, too large or not readable.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SpecError(
                f"{directory}: missing tokenizer.json",
                hint="save one there with transformers: "
                "AutoTokenizer.from_pretrained(…).save_pretrained(directory)",
            )
        try:
            data = read_file(path, JSON_BYTES)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise SpecError(f"{path}: not readable: {error}", hint="download the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._settings = settings_in(directory / "tokenizer_config.json")
        self._date = date
        self._with_parts = dict[str, bool]()  # by role
        template = self.template = template_in(directory, self._settings)
        self.call_form = form_of(template)
        self._call_ids = [
            number for mark in SPECIAL if (number := self._tokenizer.token_to_id(mark)) is not None
        ]
        self._chats: ChatTemplate | None = None
        if template is not None:
            # special tokens as transformers finds them: the older file of their own is second
            older = settings_in(directory / "special_tokens_map.json")
            texts = {key: _text(self._settings, key) or _text(older, key) for key in _SPECIAL}
            tokens = {key: text for key, text in texts.items() if text is not None}
            self._chats = ChatTemplate(template, tokens, TEMPLATE_SECONDS)
        self._renderer = None if self._chats is None else Renderer(self._chats)
        self._sha256 = hashlib.sha256(data).hexdigest()
        configs = [settings_in(directory / name) for name in ("generation_config.json", "config.json")]
        self._named_ends = self._ids(configs, "eos_token")
        self.pad_id = (*self._ids(configs, "pad_token"), *self._named_ends, 0)[0]
        text = configs[1].get("text_config")
        size = configs[1].get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
        self._embedded = size if isinstance(size, int) else None  # how many ids the model has embeddings for

    @cached_property
    def digest(self) -> str:
        """Return a digest of all that tokens and chats follow from."""
        when = (
            (self._date or datetime.now().date().isoformat()) if "strftime_now" in str(self.template) else ""
        )
        about: list[Any] = [self._sha256, self._chats and structs.astuple(self._chats), self.eos_ids, when]
        about += [self._embedded] if self._is_larger else []
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self._renderer is not None

    @cached_property
    def special(self) -> dict[int, str]:
        """Return the texts of its special tokens, which completions leave out, by their ids."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if token.special}

    @property
    def added(self) -> dict[str, int]:
        """Return the ids of the tokens that are cut out of a text before anything else, by their text."""
        return {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content and not token.normalized and not token.single_word
        }

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end a completion.

        They are those of `generation_config.json`, else `config.json`, of `tokenizer_config.json`, and of
        what the chat template writes behind a turn of the assistant's.
        """
        return tuple(dict.fromkeys((*self._named_ends, *self._ids([], "eos_token"), *self._template_ends)))

    @property
    def late_ends(self) -> tuple[int, ...]:
        """Return the ids of `eos_ids` that the model's configuration does not name."""
        return tuple(number for number in self.eos_ids if number not in self._named_ends)

    @cached_property
    def _template_ends(self) -> tuple[int, ...]:
        """Return the tokens that the chat template writes behind the words of a last turn and its calls.

        A template that writes no token but the known end is not asked, as a process for it imports
        transformers.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        template = str(self.template)
        ends = {*self._named_ends, *self._ids([], "eos_token")}
        others = (token.content for number, token in added.items() if number not in ends)
        if not _NAMED_TOKEN.search(template) and not any(text in template for text in others):
            return ()
        behind_words = self._probed([_ASKED, _ANSWER]).rpartition(_TURN)
        words = self.encode(behind_words[2].lstrip())[:1] if behind_words[1] else []
        if not words or words[0] not in added:
            return ()
        called = self._probed([_ASKED, _CALLS]) or self._probed(self._in_calls([_ASKED, _CALLS]))
        behind_calls = called.rpartition(_TURN)
        calls = self.encode(behind_calls[2].rstrip())[-1:] if behind_calls[1] else []
        return (*words, *(number for number in calls if number in added and added[number].special))

    def _probed(self, chat: list[dict[str, Any]]) -> str:
        """Return what the chat template makes of a made-up chat; "" where it refuses it, or there is none."""
        if self._renderer is None:
            return ""
        was_running = self._renderer.process is not None
        try:
            return self._renderer.render(Job([chat], {}, [{}], self._date, generate=False))[0]
        except Refused:
            return ""
        finally:
            if not was_running:
                self.close()

    def number_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, special ones included."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. `special` adds what the tokenizer puts around plain text (a BOS).

        Leave it for what `chat` returned: the template has written the special tokens.
        """
        return self.encode_batch([text], special=special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, special: bool = False, places: Sequence[str] = ()
    ) -> list[list[int]]:
        """Encode many texts at once, while other threads run. `places` say where each text is from.

        Raises SpecError when the library gives up, and for a token that the model has no embedding for.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except BaseException as error:  # the library's are no Exceptions, as for an endless pattern
            if type(error).__name__ != "PanicException":
                raise
            raise SpecError(f"tokenizer.json cannot read the text: {error}", hint=_PATTERN) from None
        encoded = [list(encoding.ids) for encoding in encodings]
        for ids, where in zip(encoded, places or repeat(""), strict=False) if self._is_larger else ():
            self.refuse_unembedded(ids, where)
        return encoded

    @cached_property
    def _is_larger(self) -> bool:
        """Whether any token may have no embedding."""
        highest = max(self._tokenizer.get_vocab_size() - 1, *self._tokenizer.get_added_tokens_decoder(), 0)
        return self._embedded is not None and highest >= self._embedded

    def refuse_unembedded(self, ids: Sequence[int], where: str) -> None:
        """Raise SpecError, which says where the text is from, for an id without an embedding."""
        if self._embedded is not None and (number := max(ids, default=0)) >= self._embedded:
            token = self.decode([number], skip_special=False)
            raise SpecError(
                f"{where and f'{where}: '}the token {token} has the id {number}, and there are embeddings "
                f"for {self._embedded}",
                hint="Resize them with transformers (resize_token_embeddings) and train them before, or take "
                "the token out of the text, the chat template and tokenizer.json.",
            )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def with_calls(self, ids: Sequence[int]) -> str:
        """Decode without special tokens, except the ones that are part of calls of tools."""
        if not set(self._call_ids) & set(ids):
            return self.decode(ids)
        dropped = self.special.keys() - self._call_ids
        return self.decode([number for number in ids if number not in dropped], skip_special=False)

    def completion(self, ids: Sequence[int], stops: Sequence[str], *, calls: bool = False) -> str:
        """Decode a completion without special tokens, and without the first stop string and what follows.

        With `calls`, special tokens that are part of calls of tools stay.
        """
        text = self.with_calls(ids) if calls else self.decode(ids)
        return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]

    def chat(
        self,
        messages: Chat,
        settings: Mapping[str, Any] | None = None,
        *,
        generate: bool = True,
        continues: bool = False,
    ) -> str:
        """Render `messages` ({role, content}) as the model wants them, up to where the assistant speaks.

        The settings are further variables of the template, `tools` among them: see `tools/specs.py`. For the
        others see `chats`. Raises SpecError without a template and when the template refuses the messages or
        takes too long.
        """
        try:
            return self.chats([messages], settings or {}, generate=generate, continues=continues)[0]
        except Refused as error:
            raise refusal(error) from error

    def chats(
        self,
        chats: Sequence[Chat],
        settings: Mapping[str, Any],
        own: Sequence[Mapping[str, Any]] = (),
        *,
        generate: bool = True,
        continues: bool = False,
    ) -> list[str]:
        """Render many chats at once; without `generate` as they stand, with nothing behind the last message.

        Raises SpecError without a template and for calls of tools that are none, and Refused for the first
        chat without a text.

        own: The variables of each chat alone; empty where there are none.
        continues: Whether a chat that ends with the assistant's words ends behind them, so that the model
            goes on with that turn.
        """
        if self._renderer is None:
            hint = "give prompts as strings, or put chat_template.jinja into the model directory"
            raise SpecError("messages need a chat template and the model has none", hint=hint)
        plain = [self._in_calls(self._in_parts(for_template(chat))) for chat in chats]
        for index, chat in enumerate(plain if continues else ()):
            last = chat[-1]
            if last["role"] == "assistant" and (last.get("tool_calls") or not last.get("content")):
                raise Refused(index, "its last message is the assistant's, and has no words to continue")
        each = [dict(variables) for variables in own] or [{}] * len(plain)
        return self._renderer.render(Job(plain, dict(settings), each, self._date, generate, continues))

    def _in_parts(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Join parts of content with line breaks, as vLLM does, unless the template writes parts as parts."""
        messages = []
        for message in chat:
            if isinstance(message.get("content"), list):
                role = message["role"]
                if role not in self._with_parts:
                    turn = {"role": role, "content": _PARTS}
                    text = self._probed([*_BEFORE.get(role, []), turn, *_BEHIND.get(role, [])])
                    start, end = (text.find(part["text"]) for part in _PARTS)
                    self._with_parts[role] = 0 <= start < end and "type" not in text[start:end]
                if not self._with_parts[role]:
                    message = {**message, "content": "\n".join(part["text"] for part in message["content"])}
            messages.append(message)
        return messages

    def _in_calls(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write calls as the template reads them: DeepSeek's wants content beside them, and text in them."""
        return [
            _calling(message, *self._call_keys) if message.get("tool_calls") else message for message in chat
        ]

    @cached_property
    def _call_keys(self) -> tuple[bool, bool]:
        """Return whether the template writes calls only with content, and only with text as arguments."""
        ways = [(False, False), (True, False), (False, True), (True, True)]
        call = {key: value for key, value in _CALLS.items() if key != "content"}
        return next((way for way in ways if _TURN in self._probed([_ASKED, _calling(call, *way)])), ways[0])

    def close(self) -> None:
        """End the process that renders; the next `chat` starts another."""
        if self._renderer is not None:
            self._renderer.close()

    def _ids(self, configs: Sequence[Mapping[str, Any]], key: str) -> tuple[int, ...]:
        for config in configs:
            value = config.get(f"{key}_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        number = self._tokenizer.token_to_id(_text(self._settings, key) or "")
        return () if number is None else (number,)


def _calling(message: dict[str, Any], has_content: bool, is_text: bool) -> dict[str, Any]:
    """Return a message of calls, with empty content where it has none, and with arguments as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if is_text and not isinstance(arguments := call["function"]["arguments"], str)
        else call
        for call in message["tool_calls"]
    ]
    content = {"content": message.get("content") or ""} if has_content else {}
    return {**message, **content, "tool_calls": calls}


def _text(settings: Mapping[str, Any], key: str) -> str | None:
    """Return the text of a special token: a string, or an object with `content` in older files."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def refusal(error: Refused, where: str = "") -> SpecError:
    """Return the error of a chat that was refused; `where` says which chat, if that is not clear."""
    return SpecError(f"{where and where + ': '}the chat template refused the messages: {error}", hint=_ADVICE)
