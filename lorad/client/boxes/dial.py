"""Carry bytes between stdin, stdout and the daemon's socket, for `lorad --host` where ssh forwards none.

It runs for each request of a client elsewhere, and so imports hardly more than the standard library.
"""

import os
import selectors
import socket
import sys

from lorad.box.paths import Home, default_home

_PIECE = 1 << 16  # bytes that are read at a time


def dial() -> int:
    """Carry bytes until the daemon has closed its end, and return the exit code.

    A half-close is passed on, so that an answer of HTTP/1.0 ends with its connection.
    """
    daemon = Home(default_home()).socket
    with socket.socket(socket.AF_UNIX) as far, selectors.PollSelector() as ways:
        try:
            far.connect(str(daemon))
        except OSError as error:
            print(f"no daemon answers on {daemon}: {error.strerror}", file=sys.stderr)
            return 5
        ways.register(0, selectors.EVENT_READ)
        ways.register(far, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in ways.select():
                    if key.fileobj is far:
                        if not (data := far.recv(_PIECE)):
                            return 0
                        while data:
                            data = data[os.write(1, data) :]
                    elif data := os.read(0, _PIECE):
                        far.sendall(data)
                    else:
                        ways.unregister(0)
                        far.shutdown(socket.SHUT_WR)
        except OSError:  # one of both ends is gone
            return 1
