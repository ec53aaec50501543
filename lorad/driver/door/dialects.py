"""The forms in which programs speak with the model: OpenAI's chat and responses, and Anthropic's messages.

Each is read as a chat, so that an episode is the same whatever its program speaks. What a dialect has beyond
a chat is refused by name where it would change what is sampled, and left out where it would not.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lorad.driver.door import messages, responses
from lorad.driver.door.chat import Chat, DoorRefusal, chat_of, decoded, streamed
from lorad.protocol.batch import Sampling


class ChatDialect(NamedTuple):
    """How a program asks, and how it is answered.

    read: Reads a request for an episode that is sampled so. Raises DoorRefusal.
    answer: Makes an answer of a chat completion.
    stream: Makes the events of a stream of a chat completion; the request says what it wants of it.
    refuse: Makes the body of a refusal.
    """

    read: Callable[[bytes, Sampling], Chat]
    answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    stream: Callable[[Mapping[str, Any], Chat], bytes]
    refuse: Callable[[DoorRefusal], Mapping[str, Any]]


_CHAT = ChatDialect(
    lambda body, how: chat_of(decoded(body), how),
    lambda answer: answer,
    lambda answer, chat: streamed(answer, wants_usage=chat.wants_usage),
    lambda refusal: refusal.body,
)
_RESPONSES = ChatDialect(
    responses.read,
    responses.answer_of,
    lambda answer, chat: responses.streamed(answer),
    lambda refusal: refusal.body,
)
MESSAGES = ChatDialect(
    messages.read, messages.answer_of, lambda answer, chat: messages.streamed(answer), messages.refuse
)
DIALECTS = {"chat/completions": _CHAT, "responses": _RESPONSES, "messages": MESSAGES}
"""Dialects by their path behind the base URL."""
