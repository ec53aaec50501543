"""The parameters of a request.

Any other that would change the answer is refused by its name, never ignored.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from lorad.gateway.errors import ApiError, refused
from lorad.protocol.batch import Sampling

_HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""Of no effect on the text."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""What is not supported -> values that ask for nothing; null always does."""
NEUTRAL_COMPLETION = {**_NEUTRAL, "echo": (False,), "suffix": ("",)}
NEUTRAL_CHAT = {
    **_NEUTRAL,
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED = "unsupported_parameter"
_MOST_STOPS = 16


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample; the defaults are OpenAI's. top_k: as in vLLM, 0 and -1 mean all."""

    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1 << 30)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int, eos_ids: tuple[int, ...], *, logprobs: bool) -> Sampling:
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            stop_token_ids=eos_ids,
            stop=self.stops,
            stream=self.stream,
            logprobs=logprobs,
        )


class CompletionWish(Wish, frozen=True, kw_only=True):
    """logprobs: of the tokens that were chosen, and of no others, whatever the number."""

    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    best_of: int | None = None


class ChatWish(Wish, frozen=True, kw_only=True):
    """A request for a chat.

    messages: as the client wrote them; the chat template gets every key.
    chat_template_kwargs: further variables of the chat template, as vLLM takes them.
    """

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool = False


T = TypeVar("T", bound=Wish)


def read(body: bytes, kind: type[T], neutral: Mapping[str, tuple[Any, ...]]) -> T:
    """Raises ApiError."""
    try:
        data = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    asked = {key: value for key, value in data.items() if value is not None and key not in _HARMLESS}
    for key in asked.keys() - set(kind.__struct_fields__):
        if key not in neutral:
            raise refused(key, "there is no such parameter.", "unknown_parameter")
        if not any(asked.pop(key) == value for value in neutral[key]):
            raise refused(
                key, "this is not supported, and would change the answer; leave it out.", _UNSUPPORTED
            )
    try:
        wish = msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        raise unfit(error) from None
    _check(wish)
    return wish


def unfit(error: msgspec.ValidationError) -> ApiError:
    """`Expected int - at $.n` and ``missing required field `model` `` name a parameter."""
    found = re.search(r"at `\$\.([a-z_]+)|field `([a-z_]+)`", str(error))
    param = (found[1] or found[2]) if found else None
    return ApiError(400, f"{param or 'The body'}: {error}.", param=param)


def _check(wish: Wish) -> None:
    if len(wish.stops) > _MOST_STOPS or not all(wish.stops):
        raise refused("stop", f"give at most {_MOST_STOPS} strings, none of them empty.")
    if wish.stream_options is not None and not wish.stream:
        raise refused("stream_options", "only for stream: true.")
    if isinstance(wish, CompletionWish) and wish.best_of not in (None, wish.n):
        raise refused("best_of", "this is not supported; ask for n.", _UNSUPPORTED)
