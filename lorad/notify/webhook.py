"""Posts a notification to a web address: as JSON, or as the text that Slack, Discord and ntfy take."""

import contextlib
import html
from typing import Any

import aiohttp
import msgspec

from lorad import __version__
from lorad.box.private import read_key
from lorad.notify.table import Message, Undelivered
from lorad.spec.notify import Notify, is_address

_DISCORD = 1900  # characters that it takes at most
_SLACK = 3000
_NTFY = 3900
_LONGEST_WAIT = 900.0  # seconds of Retry-After that are obeyed
_URGENT = ("failure", "alarm")


async def post(to: Notify, message: Message) -> None:
    """Post a message. Redirections are not followed: they would take the token elsewhere.

    Raises SpecError for an unreadable file, and Undelivered unless the answer is 2xx. Their words hold no
    address and no token; `wait` is what the receiver asks for by Retry-After.
    """
    url = read_key(to.url_file) if to.url_file is not None else to.url or ""
    if not is_address(url):
        raise Undelivered(f"{to.url_file} holds no http:// or https:// address")
    headers = {"User-Agent": f"lorad/{__version__}", "Idempotency-Key": message.id}
    if to.token_file is not None:
        headers["Authorization"] = f"Bearer {read_key(to.token_file)}"
    if to.form == "ntfy":
        urgent = {"Priority": "high", "Tags": "warning"} if message.event in _URGENT else {}
        headers |= {"Title": message.title, "Content-Type": "text/plain; charset=utf-8", **urgent}
        body = message.text[:_NTFY].encode()
    else:
        shaped: Any = message
        if to.form == "slack":
            shaped = {"text": html.escape(message.text[:_SLACK], quote=False)}
        elif to.form == "discord":
            shaped = {"content": message.text[:_DISCORD], "allowed_mentions": {"parse": []}}
        headers["Content-Type"] = "application/json"
        body = msgspec.json.encode(shaped)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=to.timeout), trust_env=True) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            if 300 <= answer.status < 400:
                raise Undelivered(f"it answered {answer.status}: redirections are not followed")
            if not 200 <= answer.status < 300:
                pause = 0.0
                with contextlib.suppress(ValueError):  # a date is not obeyed
                    pause = min(_LONGEST_WAIT, max(0.0, float(answer.headers.get("Retry-After", "0"))))
                raise Undelivered(f"it answered {answer.status}", pause)
    except TimeoutError:
        raise Undelivered(f"it did not answer within {to.timeout:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise Undelivered(
            f"it cannot be reached: {error.os_error.strerror or type(error).__name__}"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:  # their words may quote the address
        raise Undelivered(f"it did not take it: {type(error).__name__}") from None
