"""Anthropic's messages (https://docs.anthropic.com/en/api/messages), read as a chat."""

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from lorad.driver.door.chat import Chat, DoorRefusal, chat_of, decoded, events_of
from lorad.protocol.batch import Sampling

_IGNORED = frozenset({"thinking", "context_management", "output_config", "container", "inference_geo"})
"""Of no effect here: they are for models that have it, or say where to run."""
_THOUGHTS = ("thinking", "redacted_thinking")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: bytes, how: Sampling) -> Chat:
    """Read a request. Raises DoorRefusal."""
    request = decoded(body)
    system = _text(request.pop("system", None) or "", "system")
    own = [{"role": "system", "content": system}] if system else []
    turns = request.pop("messages", None)
    if not isinstance(turns, list) or not all(isinstance(message, dict) for message in turns):
        raise DoorRefusal("messages: give a list of messages, each with a role and content.", "messages")
    chat = {key: value for key, value in request.items() if key not in _IGNORED}
    chat["stop"] = chat.pop("stop_sequences", None)
    choice = chat.pop("tool_choice", None)
    if isinstance(choice, dict):
        chat["tool_choice"] = choice.get("type")
    tools = list[dict[str, Any]]()
    for tool in chat.pop("tools", None) or []:
        if not isinstance(tool, dict) or "input_schema" not in tool:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            problem = f"tools: the door of an episode has tools with a schema alone, and no {kind}."
            raise DoorRefusal(problem, "tools")
        about = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
        function = about | {"parameters": tool["input_schema"]}
        tools.append({"type": "function", "function": function})
    messages = [part for message in turns for part in _messages(message)]
    return chat_of({**chat, "messages": [*own, *messages], "tools": tools}, how)


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that one of Anthropic's is: answers of tools are messages of their own."""
    role = message.get("role")
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = list[Any]()
    calls = list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(block.get("text"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            output = _text(block.get("content") or "", "messages")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": output}
        elif kind not in _THOUGHTS:
            raise DoorRefusal(f"messages: the door of an episode has no blocks of {kind}.", "messages")
    if not all(isinstance(text, str) for text in texts):
        raise DoorRefusal("messages: a block has no text.", "messages")
    if texts or calls:
        yield {"role": role, "content": "".join(texts) or None} | ({"tool_calls": calls} if calls else {})


def _text(content: Any, param: str) -> str:
    """Return the text of blocks. Raises DoorRefusal for others."""
    texts = [content]
    if isinstance(content, list):
        texts = [block.get("text") if isinstance(block, dict) else None for block in content]
    if not all(isinstance(text, str) for text in texts):
        raise DoorRefusal(f"{param}: the door of an episode takes text alone.", param)
    return "".join(texts)


def answer_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Make a message of a chat completion."""
    (choice,) = answer["choices"]
    message = choice["message"]
    content = list[dict[str, Any]]()
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        about = {"id": call["id"], "name": function["name"]}
        content.append({"type": "tool_use", **about, "input": json.loads(function["arguments"])})
    usage = answer["usage"]
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": _STOPS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def streamed(answer: Mapping[str, Any]) -> bytes:
    """Make the events of a stream, each block in one piece."""
    message = answer_of(answer)
    usage = message["usage"]
    begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for place, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_start", "index": place, "content_block": empty})
        events.append({"type": "content_block_delta", "index": place, "delta": delta})
        events.append({"type": "content_block_stop", "index": place})
    end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": usage})
    events.append({"type": "message_stop"})
    return events_of(events)


def refuse(refusal: DoorRefusal) -> dict[str, Any]:
    """Make the body of a refusal; clients know a context without room by Anthropic's words."""
    is_long = refusal.code == "context_length_exceeded"
    words = f"prompt is too long: {refusal.message}" if is_long else refusal.message
    return {"type": "error", "error": {"type": "invalid_request_error", "message": words}}
