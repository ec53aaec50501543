"""Which characters of a text each of its tokens made."""

from collections.abc import Sequence

from lorad.rl.tokenizer import Tokenizer

_PART = "\N{REPLACEMENT CHARACTER}"  # what a token that is a part of a character becomes


class Widths:
    """Remembers what each token becomes, so that a token costs a look-up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = dict[int, str]()  # by token

    def of(self, text: str, ids: Sequence[int]) -> list[int]:
        """Return how many characters of the text each token made, in order.

        Special tokens that the text leaves out make 0, and so do the first parts of a character that several
        tokens make, and what was cut off with a stop string. Empty where the tokens do not make this text, or
        it cannot be said how.
        """
        widths = list[int]()
        waiting = list[int]()
        at = 0
        for id in ids:
            piece = self._texts.get(id)
            if piece is None:
                piece = self._texts[id] = self._tokenizer.decode([id], skip_special=False)
            if waiting:
                waiting.append(id)
                piece = self._tokenizer.decode(waiting)
            width: int | None
            if text.startswith(piece, at):
                width = len(piece)
            elif text.startswith(f" {piece}", at):  # tokenizers may leave out a blank before it
                width = len(piece) + 1
            else:
                is_cut = len(text) - at < len(piece) and piece.startswith(text[at:])
                width = len(text) - at if is_cut else None
            if width is not None:
                waiting.clear()
            elif piece.endswith(_PART):
                waiting = waiting or [id]
                width = 0
            elif self._tokenizer.decode([id]):
                return []
            else:
                width = 0
            widths.append(width)
            at += width
        return widths
