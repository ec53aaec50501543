"""Opens the gateway's port on 127.0.0.1, for clients that take a base URL and a key: a free port that stays.

Every user of the machine can connect to it, so that it lets in by keys alone.
"""

import logging
import socket

from lorad.box.keys import gateway_key
from lorad.box.paths import Home
from lorad.files import read_file, write_whole
from lorad.protocol.listener import answers

log = logging.getLogger(__name__)

_LOCAL = "127.0.0.1"
_DIGITS = 5


def open_port(home: Home) -> socket.socket | None:
    """Listen on the port of the last time, or on a free port where that is taken.

    Returns None where no port can be had, and where another gateway of the home is up.

    Clients may have sent the key to whoever has taken the port: then the gateway gets a new key. Raises
    OSError for files of the home.
    """
    if answers(home.gateway_socket):
        return None
    home.gateway.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        before = int(read_file(home.gateway_port, _DIGITS, links=False)) % (1 << 16)
    except (OSError, ValueError):
        before = 0
    listener = _listener(before) or _listener(0)
    if listener is None:
        home.gateway_port.unlink(missing_ok=True)
        return None
    chosen: int = listener.getsockname()[1]
    if before not in (0, chosen):
        gateway_key(home, new=True)
    write_whole(home.gateway_port, str(chosen).encode())
    return listener


def _listener(port: int) -> socket.socket | None:
    """Return a socket that listens on a port, 0 for any; None where the port cannot be had."""
    try:
        return socket.create_server((_LOCAL, port))
    except OSError as error:
        log.warning("nothing is served on port %s of %s: %s", port or "any", _LOCAL, error.strerror)
        return None
