"""Turns tokens, as they come, into text that never has half a character or anything from a stop string on."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # what a decoder makes of a part of a character
# no character is made of so many tokens: what they say is not valid and is passed on as it is
MOST_PENDING = 16


class Detokenizer:
    """Decodes one completion piece by piece; the pieces together are the text of its tokens.

    Tokens are decoded together with the tokens before them, as some tokenizers treat the beginning of a text
    differently. As in text-generation-inference and vLLM, a window slides along the text.

    Args:
        decode: Makes text of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._text_of = decode
        self._context: list[int] = []  # returned already
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that is complete with a token; "" while a character is incomplete."""
        self._pending.append(token)
        return self._decode(is_last=False)

    def rest(self) -> str:
        """Return the text that is left when there are no more tokens."""
        return self._decode(is_last=True)

    def _decode(self, *, is_last: bool) -> str:
        before = self._text_of(self._context)
        text = self._text_of(self._context + self._pending)[len(before) :]
        is_whole = text and not text.endswith(BROKEN)
        if not is_whole and not is_last and len(self._pending) < MOST_PENDING:
            return ""
        self._context = self._pending
        self._pending = []
        return text


class StopCutter:
    """Holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._unsent = ""
        self.is_cut = False

    def add(self, text: str) -> str:
        """Return the text that can be sent now."""
        if self.is_cut:
            return ""
        self._unsent += text
        places = [place for stop in self._stops if (place := self._unsent.find(stop)) >= 0]
        if places:
            self.is_cut = True
            return self.rest()[: min(places)]
        beginnings = [stop[:size] for stop in self._stops for size in range(1, len(stop))]
        keep = max((len(part) for part in beginnings if self._unsent.endswith(part)), default=0)
        sent = self._unsent[: len(self._unsent) - keep]
        self._unsent = self._unsent[len(self._unsent) - keep :]
        return sent

    def rest(self) -> str:
        """Return what is held back, as no more text comes."""
        sent = self._unsent
        self._unsent = ""
        return sent
