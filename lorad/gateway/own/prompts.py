"""Turns the prompts of a request into tokens of the base that serves it."""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from lorad.gateway.errors import ApiError, refused
from lorad.gateway.limits import MOST_SAMPLES
from lorad.gateway.own.bases import Base
from lorad.gateway.params import UNSUPPORTED, ChatWish, CompletionWish, TokenizeWish, Wish
from lorad.protocol.batch import Prompt
from lorad.rl.tools.specs import wrapped_all

_SEEDS = 1 << 64
_NO_TOOLS = (
    "this model's chat template has no tools, or writes their calls in a form that lorad does not read."
)
_DEFAULT_NEW_TOKENS = 16  # for a completion; a chat continues as long as there is room


def of_completion(wish: CompletionWish, base: Base) -> list[list[int]]:
    """Return the tokens of a string, strings, tokens, or lists of tokens. Raises ApiError."""
    parts: list[Any] = [wish.prompt] if isinstance(wish.prompt, str) else wish.prompt
    if parts and all(_is_token(part) for part in parts):
        parts = [parts]
    if parts and all(isinstance(part, str) for part in parts):
        return base.tokenizer.encode_batch(parts, special=True)
    if not parts or not all(isinstance(part, list) and all(map(_is_token, part)) for part in parts):
        raise refused(
            "prompt", "give a string, a list of strings, a list of tokens, or a list of lists of tokens."
        )
    if any(not 0 <= token < base.vocab for part in parts for token in part):
        raise refused("prompt", f"tokens of this model are at least 0 and below {base.vocab}.")
    return parts


def of_chat(wish: ChatWish, base: Base) -> list[list[int]]:
    """Return the tokens of a chat. Raises ApiError, and SpecError when the template refuses the messages."""
    text = _rendered(base, wish.messages, wish.offered(), wish.chat_template_kwargs)
    return [base.tokenizer.encode(text)]


def of_tokenize(wish: TokenizeWish, base: Base) -> list[int]:
    """Return the tokens of a text or a chat. Raises as `of_chat`."""
    if (wish.prompt is None) == (wish.messages is None):
        raise refused("prompt", "give either prompt or messages.")
    if wish.messages is None:
        return base.tokenizer.encode(wish.prompt or "", special=wish.add_special_tokens)
    tools = wrapped_all(wish.tools)
    generate = wish.add_generation_prompt
    text = _rendered(base, wish.messages, tools, wish.chat_template_kwargs, generate=generate)
    return base.tokenizer.encode(text)


def _rendered(
    base: Base,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    settings: dict[str, Any],
    *,
    generate: bool = True,
) -> str:
    """Return the text of a chat: contents as text, or parts of text, and other keys as the client wrote them.

    Raises ApiError if a content is not text, and for tools where the model has none.
    """
    if not messages:
        raise refused("messages", "there are none.")
    if not base.tokenizer.has_chat_template:
        raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
    if base.tokenizer.call_form is None and tools:
        raise refused("tools", _NO_TOOLS, UNSUPPORTED)
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise refused("messages", "every message needs a role.")
        for key in ("function_call", "audio"):
            if message.get(key):
                raise refused("messages", f"{key} is not supported.", UNSUPPORTED)
        if base.tokenizer.call_form is None and (message.get("tool_calls") or message["role"] == "tool"):
            raise refused("messages", _NO_TOOLS, UNSUPPORTED)
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise refused("messages", "only content of type text is supported.", UNSUPPORTED)
        elif content is not None and not isinstance(content, str):
            raise refused("messages", "content is a string, or a list of parts of type text.")
    chat = [{**message, "content": message.get("content") or ""} for message in messages]
    return base.tokenizer.chat(chat, {**settings, "tools": tools} if tools else settings, generate=generate)


def new_tokens(wish: Wish, tokens: Sequence[Sequence[int]], base: Base, limit: int) -> int:
    """Return how many tokens to sample at most. Raises ApiError if they do not fit behind the prompts."""
    limit = min(limit, base.max_positions)
    longest = max(map(len, tokens))
    if min(map(len, tokens)) < 1:
        raise refused("prompt", "a completion begins with at least one token.")
    if len(tokens) * wish.n > MOST_SAMPLES:
        raise refused("n", f"one request makes at most {MOST_SAMPLES} completions.")
    if isinstance(wish, ChatWish):
        most = wish.max_completion_tokens or wish.max_tokens or max(limit - longest, 1)
    else:
        most = _DEFAULT_NEW_TOKENS if wish.max_tokens is None else wish.max_tokens
    if longest + most > limit:
        raise ApiError(
            400,
            f"This model has room for {limit} tokens: {longest} of the prompt and {most} of the "
            "completion are more.",
            param="messages" if isinstance(wish, ChatWish) else "prompt",
            code="context_length_exceeded",
        )
    return most


def prompts(wish: Wish, tokens: Sequence[Sequence[int]]) -> list[Prompt]:
    """Return prompts with their seeds: if the wish has a seed, completion i of any prompt has seed + i."""
    first = secrets.randbits(64) if wish.seed is None else wish.seed
    step = 0 if wish.seed is not None else wish.n
    return [
        Prompt(
            str(place),
            np.array(part, np.int32),
            np.array([(first + place * step + i) % _SEEDS for i in range(wish.n)], np.uint64),
        )
        for place, part in enumerate(tokens)
    ]


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
