"""Chats as text, cut into what is trained and what is not.

A chat is rendered up to an assistant's turn, with the generation prompt, and again with that turn: the
difference is what the assistant says, with its end-of-turn token. A template that renders a turn otherwise
once there is more (it drops what was thought, or ends the last turn with a token of its own) makes a sample
of each turn, behind what it writes before that turn.

Of a chat with many turns each is rendered behind the exchange before it alone, and what comes out must make
the whole chat, which is rendered once; two turns are rendered behind all that is before them, too. So a chat
costs its length. Where that fails, each turn is rendered behind all that is before it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.completions.formats import ChatTurns
from lorad.rl.sources import Row

_FEW = 8  # turns, each of which is rendered behind all that is before it
_AT_ONCE = 32  # turns of a chat that are rendered before anybody looks whether more are wanted
_OPENED = re.compile(r"<think>\s*\Z")
_BACK = 8  # messages at most in which a user's is looked for, for an exchange to begin with
Texts = Callable[[Sequence[tuple[Row, list[dict[str, Any]]]], bool], list[str]]
"""Renders chats, each of a row; True: up to where the assistant begins to speak."""
REWRITES = "the chat template renders what is before an assistant's turn in another way"


class Part(Struct, frozen=True):
    """A part of a sample as text, and whether it is trained. The first part is the prompt.

    is_bare: It ends with the words of a message, so that an end token is added unless the words end with one.
    """

    text: str
    trained: bool
    is_bare: bool = False


class Samples(Struct, frozen=True):
    """The samples of a chat.

    parts: The parts of each sample.
    left: How many of the chat's last turns were not rendered.
    """

    parts: list[list[Part]]
    left: int = 0


_Pair = tuple[str, str]  # a chat up to a trained turn, and with that turn


def cut_chats(
    chats: Sequence[tuple[Row, ChatTurns]], texts: Texts, too_long: Callable[[Sequence[str]], bool]
) -> Iterator[Samples]:
    """Yield the samples of each chat. Raises SpecError.

    Where `too_long` says that all of some prompts are too long, the rest of the chat is left out.
    """
    few = [(row, turns.messages, turns.trained) for row, turns in chats if len(turns.trained) <= _FEW]
    pairs = iter(_pairs([(row, messages, place) for row, messages, places in few for place in places], texts))
    for row, turns in chats:
        places = turns.trained
        if len(places) <= _FEW:
            yield Samples(_samples(row, turns.messages, places, [*islice(pairs, len(places))], texts))
        elif (parts := _by_exchanges(row, turns.messages, places, texts)) is not None:
            yield Samples([parts])
        else:
            # up to each trained turn, as long as any turn is of use
            rendered = list[_Pair]()
            grows = True
            text = ""
            for start in range(0, len(places), _AT_ONCE):
                more = _pairs(
                    [(row, turns.messages, place) for place in places[start : start + _AT_ONCE]], texts
                )
                for before, after in more:
                    grows = grows and before.startswith(text)
                    text = after
                rendered += more
                HEART.progress()
                if not grows and too_long([before for before, _ in more]):
                    break
            samples = _samples(row, turns.messages, places[: len(rendered)], rendered, texts)
            yield Samples(samples, len(places) - len(rendered))


def _pairs(places: Sequence[tuple[Row, list[dict[str, Any]], int]], texts: Texts) -> list[_Pair]:
    """Render chats up to a turn of each, and with that turn."""
    before = texts([(row, messages[:place]) for row, messages, place in places], True)
    after = texts([(row, messages[: place + 1]) for row, messages, place in places], False)
    return [*zip(before, after, strict=True)]


def _by_exchanges(
    row: Row, messages: list[dict[str, Any]], places: Sequence[int], texts: Texts
) -> list[Part] | None:
    """Render each trained turn behind the exchange before it; None where that does not make the chat."""
    head = 1 if messages[0]["role"] in ("system", "developer") else 0
    begins = [head]
    for place in places[:-2]:  # the next exchange goes back to a message of the user's, if one is near
        back = range(place + 1, max(head, place + 1 - _BACK) - 1, -1)
        begins.append(next((number for number in back if messages[number]["role"] == "user"), place + 1))
    ends = [(before + 1, place, place + 1) for before, place in pairwise(places)]
    chats = [
        [(row, messages[:head] + messages[begin:end]) for end in its_ends]
        for begin, its_ends in zip(begins, ends, strict=True)
    ]
    half = len(places) // 2
    try:
        wholes = _pairs([(row, messages, places[number]) for number in (0, half, -1)], texts)
        answered = iter(texts([chat for before, _, after in chats for chat in (before, after)], False))
        begun = texts([chat for _, chat, _ in chats], True)
    except SpecError:
        return None
    exchanges = [("", *wholes[0]), *((next(answered), text, next(answered)) for text in begun)]
    parts = list[Part]()
    for before, text, after in exchanges:
        if not (text.startswith(before) and after.startswith(text)):
            return None
        parts += [Part(text[len(before) :], False), Part(after[len(text) :], True)]
    for number, whole in zip((0, half, len(places) - 1), wholes, strict=True):
        before = "".join(part.text for part in parts[: 2 * number + 1])
        if (before, before + parts[2 * number + 1].text) != whole:
            return None
    return [*parts[:-1], replace(parts[-1], is_bare=_is_bare(messages[places[-1]], wholes[-1][1]))]


def _is_bare(message: Mapping[str, Any], text: str) -> bool:
    """Return whether a text ends with the words of a message, so that perhaps nothing ends the turn."""
    content = message.get("content") or ""
    return text.rstrip().endswith((content if isinstance(content, str) else content[-1]["text"]).strip())


def _set_apart(row: Row, messages: list[dict[str, Any]], place: int, pair: _Pair, texts: Texts) -> _Pair:
    """Find a turn where the template writes what is before it in another way once the turn is there.

    Hermes does so with the results of tools: the turn is found by the generation prompt. DeepSeek's opens
    thoughts there and leaves them out of the turn, and so does the pair. Mistral's writes a system prompt
    beside the last message if the user said it: the turn is found in the chat without the system prompt.
    Returns the pair as it is where all of that fails.
    """
    before, after = pair
    opened = _OPENED.search(before)
    if opened and after.startswith(before[: opened.start()]):
        return before[: opened.start()], after
    last = max((number for number in range(place) if messages[number]["role"] == "assistant"), default=-1)
    begun, answered = texts([(row, messages[:place]), (row, messages[: last + 1] or messages[:1])], False)
    past = answered if last >= 0 else ""
    mark = before[len(begun) :] if before.startswith(begun) else ""
    rest = after[len(past) :] if after.startswith(past) else ""
    if mark.strip() and rest.count(mark) == 1:
        return before, before + rest.partition(mark)[2]
    if messages[0]["role"] in ("system", "developer") and place > 1:
        (prompt,), (whole,) = (texts([(row, messages[1:end])], end == place) for end in (place, place + 1))
        turn = whole[len(prompt) :] if whole.startswith(prompt) else ""
        return (before, before + turn) if turn and after.endswith(turn) else pair
    return pair


def _samples(
    row: Row, messages: list[dict[str, Any]], places: Sequence[int], pairs: Sequence[_Pair], texts: Texts
) -> list[list[Part]]:
    """Cut a chat into parts, for one sample, or for one of each turn where the template rewrites the past.

    The `pairs` are the chat up to each trained turn, and with that turn. Raises SpecError where the second
    does not begin with the first.
    """
    pairs = [
        pair if pair[1].startswith(pair[0]) else _set_apart(row, messages, place, pair, texts)
        for place, pair in zip(places, pairs, strict=True)
    ]
    if not all(after.startswith(before) for before, after in pairs):
        raise SpecError(
            f"{row.where}: {REWRITES} with that turn, so that the turn cannot be found in the text",
            hint="Templates that drop what was thought do so: leave that out of the messages before the last "
            "answer, or set a variable of the template by data.chat_template_kwargs.",
        )
    parts = list[Part]()
    text = ""
    grows = True
    for place, (before, after) in zip(places, pairs, strict=True):
        grows = grows and before.startswith(text)
        is_bare = _is_bare(messages[place], after)
        parts += [Part(before[len(text) :], False), Part(after[len(before) :], True, is_bare)]
        text = after
    if grows:
        return [[replace(part, is_bare=part.is_bare and part is parts[-1]) for part in parts]]
    wholes = [Part(before, False) for before, _ in pairs]
    return [[whole, turn] for whole, turn in zip(wholes, parts[1::2], strict=True)]
