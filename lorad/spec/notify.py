"""Say who hears of a run's start, end, failure and alarms: `notify` of a spec or of config.yaml."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, field

from lorad.spec.numbers import Part

Occasion = Literal["start", "end", "failure", "alarm", "look"]
_SECRET_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com")


class Notify(Part, frozen=True):
    """A receiver of notifications: a command, or a web address.

    Attributes:
        command: program and arguments, started without a shell as the owner of the run; it gets the
            notification as JSON on its standard input, and `LORAD_RUN`, `LORAD_EVENT`, `LORAD_TEXT` and
            others in its environment.
        url: address that the notification is posted to (`http://` or `https://`).
        url_file: file that holds the address, readable by its owner only, for one that is a secret.
        token_file: file that holds a token, readable by its owner only, that is sent as
            `Authorization: Bearer`.
        form: what is posted: `json` is all that is known, `slack`, `discord` and `ntfy` a text as these take
            it; with `apprise` the file holds the address of a service of that package (`lorad[apprise]`).
        events: `start`, `end` (however it ended), `failure` (only where it failed), `alarm` (what is broken),
            `look` (alarms that may be well).
        timeout: seconds for one try; a command is then killed with all that it started.
        every: seconds in which an alarm of one kind is sent once, however often it comes and goes.
    """

    command: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=100)] | None
    ) = None
    url: str | None = None
    url_file: str | None = None
    token_file: str | None = None
    form: Literal["json", "slack", "discord", "ntfy", "apprise"] = "json"
    events: Annotated[list[Occasion], Meta(min_length=1)] = field(
        default_factory=lambda: ["end", "failure", "alarm"]
    )
    timeout: Annotated[float, Meta(gt=0, le=600)] = 30.0
    every: Annotated[float, Meta(ge=60, le=604800)] = 3600.0

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.command, self.url, self.url_file)) != 1:
            raise ValueError("notify: a receiver has either command, url or url_file")
        if self.command is not None and (self.token_file is not None or self.form != "json"):
            raise ValueError("notify: token_file and form belong to url or url_file, not to command")
        if self.form == "apprise" and (self.url_file is None or self.token_file is not None):
            raise ValueError("notify: form: apprise has url_file, whose address holds the token too")
        if self.command is not None and any("\0" in word for word in self.command):
            raise ValueError("notify: command has a NUL character")
        if self.url is not None:
            if not is_address(self.url):
                raise ValueError("notify: url is not an http:// or https:// address")
            parts = urlsplit(self.url)
            if "@" in parts.netloc or parts.hostname in _SECRET_HOSTS:
                raise ValueError(
                    "notify: this url is a secret, and specs are stored and shown: put it into a file and "
                    "name that as url_file"
                )

    @property
    def title(self) -> str:
        """Name the receiver without a secret: the program, the host of the address, or the file."""
        if self.command is not None:
            return self.command[0]
        return self.url_file or urlsplit(self.url or "").netloc


def is_address(text: str) -> bool:
    """Check whether `text` is an address that can be posted to."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable() and " " not in text
    )
