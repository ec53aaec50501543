"""Sends a notification by mail, Telegram, Teams, PagerDuty and other services, with the package apprise."""

import asyncio
import logging
from typing import Any

from lorad.box.private import read_key
from lorad.errors import SpecError
from lorad.notify.table import Message, Undelivered
from lorad.spec.notify import Notify

_KINDS = {"failure": "failure", "alarm": "warning"}  # others are information


def service_of(to: Notify) -> Any:
    """Return apprise's service at the address in `url_file`.

    It follows no redirection, which would take the address's secrets elsewhere. Raises SpecError, whose words
    do not quote the address, where the package is missing or knows no such service.
    """
    try:
        from apprise import Apprise, AppriseAsset
    except ImportError:
        raise SpecError(
            "form: apprise needs the package apprise, which is not installed",
            hint="pip install 'lorad[apprise]' beside lorad.",
        ) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its words may quote the address
    asset = AppriseAsset(app_id="lorad", http_redirects=0, pgp_autogen=False, pem_autogen=False)
    service = Apprise.instantiate(read_key(to.url_file or ""), asset=asset)
    if service is None:
        raise SpecError(
            f"{to.url_file} holds no address of a service that apprise knows",
            hint="It holds the address alone, such as tgram://TOKEN/CHAT or mailto://USER:PASSWORD@example.org.",
        )
    service.socket_connect_timeout = service.socket_read_timeout = to.timeout
    return service


async def send(to: Notify, message: Message) -> None:
    """Send a message. Raises SpecError and Undelivered, whose words hold nothing of the address."""
    service = service_of(to)
    try:
        async with asyncio.timeout(to.timeout):
            is_delivered = await service.async_notify(
                title=message.title[: service.title_maxlen],
                body=message.text[: service.body_maxlen],
                notify_type=_KINDS.get(message.event, "info"),
            )
    except TimeoutError:
        raise Undelivered(f"{service.service_name} did not answer within {to.timeout:g} s") from None
    if not is_delivered:
        raise Undelivered(f"{service.service_name} did not take it")
