"""Rows of chats of random shape."""

import json
import random
from typing import Any

from tests.rl.chats.reference import KEYS

_WORDS = ["rain", "2+2?", "four", "é", "ü", "日本", "🙂", "<b>", "&", '"', "'", "\\", "{}", "{{x}}", "0.5"]
_WORDS += ["\n", "\n\n", "\t", "", ".", "null", "a\u0301", "\u200b", "<think>", "[INST]", "<|im_end|>", "<s>"]
_NAMES = ("weather", "add", "名前", "get-it", "a.b")
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"enum": [1, None]}}}


def words(rng: random.Random, most: int = 6) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(0, most)))


def said(rng: random.Random) -> str:
    """What somebody says: not blank, and without marks that templates cut at."""
    return f"{rng.choice(('so', 'No', '12', 'ja'))} {words(rng).replace('<think>', '')}"


def content(rng: random.Random) -> Any:
    if rng.random() < 0.85:
        return said(rng)
    return [{"type": "text", "text": said(rng)} for _ in range(rng.randint(1, 3))]


def arguments(rng: random.Random) -> Any:
    values = (words(rng, 2), rng.randint(-9, 9), None, True, [1, "a"], {"in": words(rng, 1)})
    found = {rng.choice(("city", "day", "ü", "a b")): rng.choice(values) for _ in range(rng.randint(0, 3))}
    return found if rng.random() < 0.7 else json.dumps(found)


def call(rng: random.Random) -> dict[str, Any]:
    function = {"name": rng.choice(_NAMES), "arguments": arguments(rng)}
    return {"id": f"call0000{rng.randint(0, 9)}", "type": "function", "function": function}


def answer(rng: random.Random) -> dict[str, Any]:
    """A turn of the assistant's: words, thoughts, calls, and perhaps whether it is trained."""
    message: dict[str, Any] = {"role": "assistant", "content": content(rng)}
    if rng.random() < 0.15:
        message |= {rng.choice(KEYS): rng.choice((0, 1, False, True, None))}
    if rng.random() < 0.15:
        message |= {rng.choice(("reasoning_content", "thinking")): said(rng)}
    elif rng.random() < 0.15 and isinstance(message["content"], str):
        message["content"] = f"<think>\n{said(rng)}\n</think>\n\n{message['content']}"
    if rng.random() < 0.1:
        message["tool_calls"] = rng.choice((None, []))
    return message


def exchange(rng: random.Random) -> list[dict[str, Any]]:
    """A question and its answer, behind calls of tools in some of them."""
    asked = {"role": "user", "content": content(rng)} | (
        {"name": rng.choice((None, "ann"))} if rng.random() < 0.1 else {}
    )
    if rng.random() > 0.3:
        return [asked, answer(rng)]
    calls = [call(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    turn = answer(rng) | {"content": rng.choice(("", None, "I look.", "  ")), "tool_calls": calls}
    if rng.random() < 0.3:
        del turn["content"]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": said(rng)} for one in calls]
    return [asked, turn, *results, answer(rng)]


def chat(rng: random.Random) -> list[dict[str, Any]]:
    begin = (
        [{"role": rng.choice(("system", "developer")), "content": said(rng)}] if rng.random() < 0.3 else []
    )
    messages = begin + [message for _ in range(rng.choice((1, 1, 2, 3))) for message in exchange(rng)]
    if rng.random() < 0.1:
        messages.insert(
            rng.randint(1, len(messages)),
            {"role": rng.choice(("system", "user", "assistant")), "content": said(rng)},
        )
    return messages


def row_of(rng: random.Random, *, is_prompt: bool) -> dict[str, Any]:
    """A row: a chat to train on, or a prompt that ends with a user's words or within the assistant's."""
    messages = chat(rng)
    if is_prompt and rng.random() < 0.7:
        messages = messages[:-1]
    row: dict[str, Any] = {"prompt" if is_prompt else "messages": messages}
    if rng.random() < 0.3:
        tools = [
            {"type": "function", "function": {"name": name, "description": words(rng), "parameters": _SCHEMA}}
            for name in rng.sample(_NAMES, rng.randint(0, 2))
        ]
        row["tools"] = tools if rng.random() < 0.7 else json.dumps(tools)
    if rng.random() < 0.1:
        row["chat_template_kwargs"] = rng.choice(
            ({"enable_thinking": False}, {"date_string": "1 May 2026"}, {}, None)
        )
    return row
