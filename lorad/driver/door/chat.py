"""Requests and answers of OpenAI's chat, as far as an episode has them."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from lorad.errors import LoradError, SpecError
from lorad.protocol.batch import Sampling
from lorad.rl.tools.calls import CallForm
from lorad.rl.tools.parsing import parse
from lorad.rl.tools.specs import wrapped_all

_HARMLESS = frozenset(
    {
        *("model", "user", "metadata", "store", "seed", "stream_options", "service_tier"),
        *("parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    }
)
"""Of no effect here: the model and the seeds are those of the episode."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "modalities": (["text"],),
    "stop": ([],),
    "top_k": (0, -1),
}


class DoorRefusal(LoradError):
    """The door refuses a request."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Chat(Struct, frozen=True):
    """A request.

    most: tokens of the answer, at most.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    most: int
    is_stream: bool
    wants_usage: bool


def decoded(body: bytes) -> dict[str, Any]:
    """Read the body of a request. Raises DoorRefusal unless it is a JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DoorRefusal(f"The body is no JSON object: {error}") from None


def chat_of(request: Mapping[str, Any], how: Sampling) -> Chat:
    """Check a request; of the sampling it may only lower the number of tokens. Raises DoorRefusal."""
    fixed = {"temperature": how.temperature, "top_p": how.top_p}
    for key, value in request.items():
        if key in _HARMLESS or value is None:
            continue
        if key in fixed and value != fixed[key]:
            problem = f"{key}: the episode is sampled with {fixed[key]:g}, so that it can be trained on. "
            raise DoorRefusal(f"{problem}Leave it out, or give what `sampling` says.", key)
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            raise DoorRefusal(f"{key}: {value!r} is not supported by the door of an episode.", key)
        if key not in {*fixed, *_NEUTRAL, *_OWN}:
            raise DoorRefusal(f"{key} is not supported by the door of an episode.", key)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
        raise DoorRefusal("messages: give a list of messages, each with a role and text.", "messages")
    most = request.get("max_completion_tokens") or request.get("max_tokens") or how.max_new_tokens
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise DoorRefusal("max_tokens: give a whole number of at least 1.", "max_tokens")
    try:
        tools = wrapped_all(request.get("tools") or [])
    except (SpecError, TypeError) as error:
        raise DoorRefusal(f"tools: {error}", "tools") from None
    usage = (request.get("stream_options") or {}).get("include_usage", False)
    return Chat(messages, tools, min(most, how.max_new_tokens), bool(request.get("stream")), bool(usage))


_OWN = frozenset({"messages", "tools", "max_tokens", "max_completion_tokens", "stream"})


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return content is None or isinstance(content, str)


def as_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: content as one string, no empty keys."""
    plain = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        kept = {key: value for key, value in message.items() if value is not None}
        plain.append({**kept, "content": content})
    return plain


def message_of(text: str, form: CallForm | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the model's turn as a message, with the calls that can be read, and all else as text."""
    if form is None or not tools:
        return {"role": "assistant", "content": text}
    parsed = parse(text, form, tools)
    calls = [call for call in parsed.calls if call.arguments is not None]
    if not calls:
        return {"role": "assistant", "content": text}
    unread = "".join(call.written for call in parsed.calls if call.arguments is None)
    tool_calls = list[dict[str, Any]]()
    for call in calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        tool_calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return {"role": "assistant", "content": parsed.text + unread or None, "tool_calls": tool_calls}


def answer_of(
    version: str, message: Mapping[str, Any], finish: str, read: int, written: int
) -> dict[str, Any]:
    """Return a whole answer."""
    reason = "tool_calls" if message.get("tool_calls") and finish == "stop" else finish
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": version,
        "choices": [
            {"index": 0, "message": {"refusal": None, **message}, "logprobs": None, "finish_reason": reason}
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def streamed(answer: Mapping[str, Any], *, wants_usage: bool) -> bytes:
    """Return an answer as the events of a stream, all of its text in one."""
    (choice,) = answer["choices"]
    message = {key: value for key, value in choice["message"].items() if key != "refusal"}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    about = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "logprobs": None, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}]},
    ]
    parts += [{"choices": [], "usage": answer["usage"]}] if wants_usage else []
    events = [b"data: " + json.dumps(about | part).encode() + b"\n\n" for part in parts]
    return b"".join([*events, b"data: [DONE]\n\n"])


def events_of(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Write the events of a stream, each named by its `type`."""
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
