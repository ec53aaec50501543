"""Errors as the official client knows them: {"detail": text}.

It repeats 408, 409, 429 and 5xx for minutes, and shows the others to its user at once. A numbered request of
a model is not refused like this: its number would be missing for ever. It is logged, and its future fails.
"""

_WORDS = 2000  # characters: the words may quote a request, and are kept where they are a result


def cut(words: str) -> str:
    """Shorten words that may quote a request."""
    return words if len(words) <= _WORDS else f"{words[:_WORDS]}…"


class HttpError(Exception):
    """A refusal with its HTTP status; the detail is for the user of the client."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(cut(detail))
        self.status = status
        self.detail = cut(detail)


class BadRequest(HttpError):
    """What the client asks for cannot be done; the text is for its user."""

    def __init__(self, words: str) -> None:
        super().__init__(400, words)


def unknown(what: str, name: str) -> HttpError:
    """Make the refusal of an unknown name, also where it is another owner's: nobody learns that it exists."""
    return HttpError(404, f"there is no {what} {name!r}")
