"""Errors as the official client knows them: {"detail": text}.

It repeats 408, 409, 429 and 5xx for minutes, and shows the others to its user at once. A numbered request of
a model is not refused like this: its number would be missing for ever. It is logged, and its future fails.
"""


class HttpError(Exception):
    """detail: for the user of the client."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class BadRequest(Exception):
    """What the client asks for cannot be done; the text is for its user."""


def unknown(what: str, name: str) -> HttpError:
    """Also of what is another owner's: nobody learns that it exists."""
    return HttpError(404, f"there is no {what} {name!r}")
