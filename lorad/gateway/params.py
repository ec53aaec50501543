"""The parameters of a request for completions.

Any other that would change the answer is refused by its name, never ignored.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from lorad.bounds import PATH_CHARACTERS
from lorad.errors import SpecError
from lorad.gateway.errors import ApiError, refused
from lorad.rl.tools.specs import wrapped_all

_HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
"""These parameters have no effect on the text."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""Maps each unsupported parameter to the values that ask for nothing; null always does."""
NEUTRAL_COMPLETION = {**_NEUTRAL, "suffix": ("",), "parallel_tool_calls": (True, False)}
NEUTRAL_CHAT = {
    **_NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
UNSUPPORTED = "unsupported_parameter"
_MOST_STOPS = 16
NEUTRAL_TOKENIZE: Mapping[str, tuple[Any, ...]] = {"continue_final_message": (False,)}
ModelName = Annotated[str, msgspec.Meta(max_length=PATH_CHARACTERS)]  # as long as the daemon takes


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A request for completions; the defaults are OpenAI's.

    Attributes:
        top_k: As in vLLM, 0 and -1 mean all.
        logprobs: Whether, or how many, log-probabilities are asked for: each kind of request says it its way.
        return_token_ids: Add the tokens of prompts and completions to the answer, as vLLM does.
    """

    model: ModelName
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1 << 30)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of tokens are asked for; a completion's 0 asks for them, too."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def alternatives(self) -> int:
        """How many other tokens are asked for in each place, with their log-probabilities."""
        return self.top_logprobs if isinstance(self, ChatWish) else self.logprobs or 0

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return isinstance(self, CompletionWish) and self.echo

    @property
    def schema(self) -> str:
        """JSON of the schema that the answer follows; "" for none."""
        return ""

    def offered(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call. Raises SpecError."""
        return []


class CompletionWish(Wish, frozen=True, kw_only=True):
    prompt: str | list[Any]
    echo: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    best_of: int | None = None


class ChatWish(Wish, frozen=True, kw_only=True):
    """A request for a chat.

    Attributes:
        messages: The messages as the client wrote them; the chat template gets every key.
        chat_template_kwargs: Further variables of the chat template, as vLLM takes them.
        parallel_tool_calls: False: the answer has no call but the first.
    """

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = {}

    @property
    def schema(self) -> str:
        kind = self.response_format.get("type", "text")
        if kind == "text":
            return ""
        described = self.response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if kind == "json_object":
            schema = {"type": "object"}
        if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
            raise refused(
                "response_format",
                'give {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
                '{"name": …, "schema": {…}}}.',
            )
        return msgspec.json.encode(schema).decode()

    def offered(self) -> list[dict[str, Any]]:
        return wrapped_all(self.tools) if self.tool_choice != "none" else []


class TokenizeWish(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the tokens of a text or a chat, as vLLM takes it."""

    model: ModelName
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


class DetokenizeWish(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the text of tokens, as vLLM takes it."""

    model: ModelName
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


W = TypeVar("W", bound=Wish)
T = TypeVar("T", bound=msgspec.Struct)


def read(body: bytes, kind: type[W], neutral: Mapping[str, tuple[Any, ...]]) -> W:
    """Read a request for completions. Raises ApiError."""
    wish = read_plain(body, kind, neutral)
    if len(wish.stops) > _MOST_STOPS or not all(wish.stops):
        raise refused("stop", f"give at most {_MOST_STOPS} strings, none of them empty.")
    if wish.stream_options is not None and not wish.stream:
        raise refused("stream_options", "only for stream: true.")
    if wish.max_tokens == 0 and not wish.echoes:
        raise refused("max_tokens", "0 is for echo: true on /v1/completions.")
    if wish.echoes and wish.stream:
        raise refused("echo", "not while streaming.", UNSUPPORTED)
    if isinstance(wish, CompletionWish) and wish.best_of not in (None, wish.n):
        raise refused("best_of", "this is not supported; ask for n.", UNSUPPORTED)
    if isinstance(wish, ChatWish):
        if wish.top_logprobs and not wish.logprobs:
            raise refused("top_logprobs", "only with logprobs: true.")
        if wish.tool_choice not in ("none", "auto"):
            why = "only none and auto: no engine makes a model call a tool."
            raise refused("tool_choice", why, UNSUPPORTED)
        try:
            offered = wish.offered()
        except SpecError as error:
            raise refused("tools", f"{error.message}. {error.hint}") from None
        if wish.schema and offered:
            raise refused("response_format", "not together with tools.", UNSUPPORTED)
    return wish


def read_plain(body: bytes, kind: type[T], neutral: Mapping[str, tuple[Any, ...]]) -> T:
    """Read a request of any kind. Raises ApiError."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    asked = {key: value for key, value in data.items() if value is not None and key not in _HARMLESS}
    for key in asked.keys() - set(kind.__struct_fields__):
        if key not in neutral:
            raise refused(key, "there is no such parameter.", "unknown_parameter")
        if not any(asked.pop(key) == value for value in neutral[key]):
            raise refused(
                key, "this is not supported, and would change the answer; leave it out.", UNSUPPORTED
            )
    try:
        return msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        raise unfit(error) from None


def unfit(error: msgspec.ValidationError) -> ApiError:
    """Name the parameter of `Expected int - at $.n` and of ``missing required field `model` ``."""
    match = re.search(r"at `\$\.([a-z_]+)|field `([a-z_]+)`", str(error))
    param = (match[1] or match[2]) if match else None
    return ApiError(400, f"{param or 'The body'}: {error}.", param=param)
