"""Who may ask: owners by their keys, `tml-` and at least 16 characters, in a file as the gateway's tokens are
(`lorad/box/tokens.py`).
"""

import hashlib
import hmac
import logging
from pathlib import Path

from lorad.box.tokens import Digests, Stamp, read_tokens, stamp_of
from lorad.errors import SpecError
from lorad.tinker.door.errors import HttpError

KEYS = "keys.yaml"  # in the door's directory, where config.yaml names no other file

log = logging.getLogger(__name__)


class Keys:
    """The file is read again when it changes; one that cannot be used lets nobody in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp = None
        self._digests: Digests = {}

    def owner(self, key: str) -> str:
        """Return whose key it is. Raises HttpError 401."""
        digest, found = hashlib.sha256(key.encode()).digest(), None
        for owner, digests in self._known().items():
            for known in digests:
                if hmac.compare_digest(digest, known):
                    found = owner  # all are compared, whichever fits
        if found is None:
            raise HttpError(401, "this is no key of this server: `lorad tinker env` prints TINKER_API_KEY")
        return found

    def _known(self) -> Digests:
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._digests, self._stamp = {}, stamp
            try:
                self._digests = read_tokens(self._path)
            except (OSError, SpecError) as error:
                log.error("nobody is let in by a key: %s", error)
        return self._digests
