"""OpenAI's responses (https://platform.openai.com/docs/api-reference/responses), read as a chat.

Nothing is stored: a request has all that was said, as with `store: false`.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from lorad.driver.door.chat import Chat, DoorRefusal, chat_of, decoded, events_of
from lorad.protocol.batch import Sampling

_IGNORED = frozenset(
    {"include", "reasoning", "text", "truncation", "background", "max_tool_calls", "client_metadata"}
    | {"prompt_cache_retention"}
)
"""Of no effect here: they say what to return or keep, or are for models that have it."""
_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"developer": "system"}  # chat templates know no developers


def read(body: bytes, how: Sampling) -> Chat:
    """Read a request. Raises DoorRefusal."""
    request = decoded(body)
    if request.get("previous_response_id") or request.get("conversation"):
        raise DoorRefusal("Nothing is stored: give all that was said as input.", "previous_response_id")
    items = request.pop("input", None)
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise DoorRefusal("input: give a text, or a list of items.", "input")
    instructions = request.pop("instructions", None)
    own = [{"role": "system", "content": instructions}] if instructions else []
    tools = request.pop("tools", None) or []
    chat = {key: value for key, value in request.items() if key not in _IGNORED}
    chat["max_tokens"] = chat.pop("max_output_tokens", None)
    chat.pop("previous_response_id", None)
    chat.pop("conversation", None)
    messages = [*own, *_messages(items)]
    functions = list[Any]()
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise DoorRefusal(f"tools: the door of an episode has functions alone, and no {kind}.", "tools")
        about = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        functions.append({"type": "function", "function": about})
    return chat_of({**chat, "messages": messages, "tools": functions}, how)


def _messages(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat; an answer of the model and the calls behind it are one."""
    answer: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            answer = answer or {"role": "assistant", "content": None}
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
            continue
        if answer is not None:
            yield answer
            answer = None
        if kind == "function_call_output":
            output = _text(item.get("output"), "input")
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        elif kind == "message":
            role = _ROLES.get(str(item.get("role")), item.get("role"))
            message = {"role": role, "content": _text(item.get("content"), "input")}
            if role == "assistant":
                answer = message
            else:
                yield message
        else:
            raise DoorRefusal(f"input: the door of an episode has no {kind}.", "input")
    if answer is not None:
        yield answer


def _text(content: Any, param: str) -> Any:
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") in _TEXTS for part in content):
        raise DoorRefusal(f"{param}: the door of an episode takes text alone.", param)
    return "".join(str(part.get("text", "")) for part in content)


def answer_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Make a response of a chat completion."""
    (choice,) = answer["choices"]
    message = choice["message"]
    output = list[dict[str, Any]]()
    if message.get("content"):
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        about = {"id": f"msg_{secrets.token_hex(12)}", "status": "completed", "role": "assistant"}
        output.append({"type": "message", **about, "content": [part]})
    for call in message.get("tool_calls") or ():
        about = {"id": f"fc_{secrets.token_hex(12)}", "status": "completed", "call_id": call["id"]}
        output.append({"type": "function_call", **about, **call["function"]})
    is_cut = choice["finish_reason"] == "length"
    usage = answer["usage"]
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def streamed(answer: Mapping[str, Any]) -> bytes:
    """Make the events of a stream, each text and each call in one piece."""
    response = answer_of(answer)
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for place, item in enumerate(response["output"]):
        events += _events(place, item)
    events.append({"type": f"response.{response['status']}", "response": response})
    return events_of([{**event, "sequence_number": number} for number, event in enumerate(events)])


def _events(place: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of an item of the output."""
    at = {"output_index": place}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", **at, "item": begun}
    at |= {"item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        text = {"content_index": 0, "logprobs": []}
        yield {"type": "response.content_part.added", **at, "content_index": 0, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **at, **text, "delta": part["text"]}
        yield {"type": "response.output_text.done", **at, **text, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "content_index": 0, "part": part}
    else:
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        done = {"name": item["name"], "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **at, **done}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}
