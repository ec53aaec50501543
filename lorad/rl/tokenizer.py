"""A model's tokenizer, read from its directory without transformers, and its chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lorad.bounds import JSON_BYTES, TEMPLATE_SECONDS
from lorad.errors import SpecError
from lorad.files import read_file
from lorad.rl.templates import Chat, Refused, Renderer, Setup, settings_in, template_in
from lorad.rl.tools.calls import SPECIAL, form_of
from lorad.rl.tools.specs import for_template

_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_ADVICE = (
    "check the roles of the messages, data.system and chat_template_kwargs, and the model's chat template"
)


_PATTERN = "its pre_tokenizer has a pattern that takes for ever: use the model's own tokenizer"


class Tokenizer:
    """Text <-> token ids.

    `eos_ids`: the ids that end a completion, of `generation_config.json`, else `config.json`, else
    `tokenizer_config.json`; empty when none names one. `pad_id`: the padding id from the same places, else
    the first of `eos_ids`, else 0. `call_form`: how the model writes calls of tools, by its chat template;
    None when it has none, or lorad does not read its form. `template`: its text; None without one.
    """

    def __init__(self, directory: Path, *, date: str | None = None) -> None:
        """date: what chat templates take for the present, in ISO 8601; None: the present.

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
            self._tokenizer = tokenizers.Tokenizer.from_buffer(read_file(path, JSON_BYTES))
        except Exception as error:  # the library raises bare Exception
            raise SpecError(f"{path}: not readable: {error}", hint="download the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._settings = settings_in(directory / "tokenizer_config.json")
        self._date = date
        template = self.template = template_in(directory, self._settings)
        self.call_form = form_of(template)
        self._call_ids = [
            number for mark in SPECIAL if (number := self._tokenizer.token_to_id(mark)) is not None
        ]
        self._renderer = None if template is None else Renderer(self._setup(template, directory))
        configs = [settings_in(directory / name) for name in ("generation_config.json", "config.json")]
        self.eos_ids = self._ids(configs, "eos_token")
        self.pad_id = (*self._ids(configs, "pad_token"), *self.eos_ids, 0)[0]

    @property
    def has_chat_template(self) -> bool:
        return self._renderer is not None

    @property
    def special_texts(self) -> list[str]:
        """Return what its special tokens are written as, which the text of a completion leaves out."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in tokens if token.special]

    @property
    def added(self) -> dict[str, int]:
        """Return the ids of the tokens that are cut out of a text before anything else, by their text."""
        return {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content and not token.normalized and not token.single_word
        }

    def number_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, special ones included."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. `special` adds what the tokenizer itself puts around a text (a BOS for some
        models).

        Set it for plain text; leave it for what `chat` returned, whose template has written the special
        tokens.
        """
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Encode many texts at once, while other threads run. Raises SpecError when the library gives up."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except (
            BaseException
        ) as error:  # its own are no Exceptions: of a pattern that backtracks for ever, for one
            if type(error).__name__ != "PanicException":
                raise
            raise SpecError(f"tokenizer.json cannot read the text: {error}", hint=_PATTERN) from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def with_calls(self, ids: Sequence[int]) -> str:
        """Decode without special tokens but those that are part of calls of tools."""
        if not set(self._call_ids) & set(ids):
            return self.decode(ids)
        dropped = {
            number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and number not in self._call_ids
        }
        return self.decode([number for number in ids if number not in dropped], skip_special=False)

    def completion(self, ids: Sequence[int], stops: Sequence[str], *, calls: bool = False) -> str:
        """Decode a completion without special tokens, and without the first stop string and what follows, as
        OpenAI and vLLM do. calls: keep special tokens that are part of calls of tools.
        """
        text = self.with_calls(ids) if calls else self.decode(ids)
        return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]

    def chat(
        self, messages: Chat, settings: Mapping[str, Any] | None = None, *, generate: bool = True
    ) -> str:
        """`messages` ({role, content}) as the model wants them, up to where the assistant begins to speak.

        settings: further variables of the template, `tools` among them: see `tools/specs.py`.
        Raises SpecError without a template and when the template refuses the messages or takes too long.
        """
        try:
            return self.chats([messages], settings or {}, generate=generate)[0]
        except Refused as error:
            raise refusal(error) from error

    def chats(
        self, chats: Sequence[Chat], settings: Mapping[str, Any], *, generate: bool = True
    ) -> list[str]:
        """`chat` of many at once; without `generate` as they stand, with nothing behind the last message.

        Raises SpecError without a template and for calls of tools that are none, and Refused for the first
        without a text.
        """
        if self._renderer is None:
            raise SpecError(
                "messages need a chat template and the model has none",
                hint="give prompts as strings, or put chat_template.jinja into the model directory",
            )
        some = [for_template(chat) for chat in chats]
        return self._renderer.render(some, settings, self._date, generate=generate)

    def close(self) -> None:
        """End the process that renders; the next `chat` starts another."""
        if self._renderer is not None:
            self._renderer.close()

    def _setup(self, template: str, directory: Path) -> Setup:
        """Collect the template's special tokens with the precedence of transformers: the older file of their
        own is second.
        """
        older = settings_in(directory / "special_tokens_map.json")
        texts = {key: self._text(key) or _content(older.get(key)) for key in _SPECIAL}
        tokens = {key: text for key, text in texts.items() if text is not None}
        return Setup(template, tokens, TEMPLATE_SECONDS)

    def _ids(self, configs: Sequence[Mapping[str, Any]], key: str) -> tuple[int, ...]:
        for config in configs:
            value = config.get(f"{key}_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        number = self._tokenizer.token_to_id(self._text(key) or "")
        return () if number is None else (number,)

    def _text(self, key: str) -> str | None:
        """Return the text of a special token: a string, or an object with `content` in older files."""
        return _content(self._settings.get(key))


def _content(value: Any) -> str | None:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def refusal(error: Refused, where: str = "") -> SpecError:
    """`where`: the chat, if that is not clear."""
    return SpecError(f"{where and where + ': '}the chat template refused the messages: {error}", hint=_ADVICE)
