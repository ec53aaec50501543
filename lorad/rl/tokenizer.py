"""A model's tokenizer and chat template, read from its directory without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from lorad.bounds import JSON_BYTES
from lorad.errors import SpecError
from lorad.files import read_file


class Tokenizer:
    """Text <-> token ids.

    `eos_ids`: the ids that end a completion, of `generation_config.json`, else `config.json`, else
    `tokenizer_config.json`; empty when none names one. `pad_id`: the padding id from the same places, else the first of
    `eos_ids`, else 0.
    """

    def __init__(self, directory: Path) -> None:
        """Raises SpecError when `tokenizer.json` is missing or not readable."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SpecError(
                f"{directory}: missing tokenizer.json",
                hint="save one there with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(directory)",
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise SpecError(f"{path}: not readable: {error}", hint="download the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._settings = _read(directory / "tokenizer_config.json")
        self._template = _template(directory, self._settings)
        configs = [_read(directory / name) for name in ("generation_config.json", "config.json")]
        self.eos_ids = self._ids(configs, "eos_token")
        self.pad_id = (*self._ids(configs, "pad_token"), *self.eos_ids, 0)[0]

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. `special` adds what the tokenizer itself puts around a text (a BOS for some models).

        Set it for plain text; leave it for what `chat` returned, whose template has written the special tokens.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """`encode` of many texts at once."""
        return [list(encoding.ids) for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=special)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """`messages` ({role, content}) as the model wants them, up to where the assistant begins to speak.

        The template runs sandboxed, with what transformers gives it. Raises SpecError without a template and when the
        template refuses the messages.
        """
        if self._template is None:
            raise SpecError(
                "messages need a chat template and the model has none",
                hint="give prompts as strings, or put chat_template.jinja into the model directory",
            )
        from jinja2 import TemplateError

        try:
            return str(self._compiled.render(messages=list(messages), add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError) as error:
            raise SpecError(f"the chat template refused the messages: {error}", hint="check their roles") from error

    @cached_property
    def _compiled(self) -> Any:
        tokens = {key: text for key in ("bos_token", "eos_token", "pad_token") if (text := self._text(key))}
        return _environment().from_string(self._template, globals=tokens)

    def _ids(self, configs: Sequence[Mapping[str, Any]], key: str) -> tuple[int, ...]:
        for config in configs:
            value = config.get(f"{key}_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        number = self._tokenizer.token_to_id(self._text(key) or "")
        return () if number is None else (number,)

    def _text(self, key: str) -> str | None:
        """The text of a special token: a string, or an object with `content` in older files."""
        value = self._settings.get(key)
        return value.get("content") if isinstance(value, dict) else value


def has_chat_template(directory: Path) -> bool:
    """As of its `Tokenizer`, without reading the vocabulary. Raises SpecError."""
    return _template(directory, _read(directory / "tokenizer_config.json")) is not None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(read_file(path, JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        told = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: not readable: {told}", hint="download the model again") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}: not a JSON object", hint="download the model again")
    return data


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The file wins over the setting; of several named ones, `default`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_file(path, JSON_BYTES).decode()
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: not readable: {error}", hint="download the model again") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _environment() -> Any:
    """jinja2 as transformers sets it up for chat templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().astimezone().strftime(format)
    return environment
