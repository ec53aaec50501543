"""The first word with a Ray cluster: it answers, and is open to nobody without its token.

For `lorad.grants.ray`, whose interpreter has the standard library and Ray.
"""

import os
import stat
import subprocess
import sys
from typing import Any, Protocol

_LOOK_SECONDS = 1.0  # between two tries
_PROBE_SECONDS = 30.0
# the client of the cluster's head answers in half a second, where ray.init tries a wrong token for 20 s
_PROBE = """
import socket, sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
address = canonicalize_bootstrap_address(sys.argv[1])
if not address:
    sys.exit(12)
print(address, flush=True)
host, _, port = address.rpartition(":")
socket.create_connection((host.strip("[]"), int(port)), 3.0).close()
try:
    GcsClient(address=address)
except AuthenticationError:
    sys.exit(11)
"""
_IS_OPEN = 0  # exit codes of _PROBE; with others there was no answer
_NO_TOKEN = 11


class _Listener(Protocol):
    def say(self, kind: str, **fields: object) -> None: ...

    def pause(self, seconds: float) -> None: ...


class RefusedError(Exception):
    """Says that nothing will be granted: `words` say why, and `hint` what to do."""

    def __init__(self, words: str, hint: str) -> None:
        super().__init__(words)
        self.words = words
        self.hint = hint


def reach(pool: _Listener, setup: dict[str, Any]) -> str:
    """Return the cluster's address once it answers there.

    Raises RefusedError where it refuses the token, or is open to everybody.
    """
    address = setup.get("address") or "auto"
    environment = _with_token(setup.get("token_file", ""))
    if address.startswith("ray://"):
        raise RefusedError(
            f"{address} is the address of a Ray Client server",
            "Give cluster.address as host:port (6379 by default) or auto.",
        )
    os.environ.update(environment)
    while True:
        code, at = _probe(address, environment)
        if code == _NO_TOKEN:
            where = setup.get("token_file") or os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
            has_token = environment["RAY_AUTH_MODE"] == "token"
            raise RefusedError(
                f"Ray at {at} refuses the token of {where}" if has_token else f"Ray at {at} asks for a token",
                "Copy the cluster's token into a file of yours with mode 0600, and name that in config.yaml: "
                "cluster.token_file.",
            )
        if code == _IS_OPEN and at:
            break
        pool.say("Waiting", words=f"Ray does not answer at {address}")
        pool.pause(_LOOK_SECONDS)
    without = {"RAY_AUTH_MODE": "disabled"}
    asks = _probe(at, without)[0] == _NO_TOKEN
    if not asks and not setup.get("insecure"):
        raise RefusedError(
            f"the Ray cluster at {at} asks for no token: whoever reaches its ports runs programs on it",
            "Start it with RAY_AUTH_MODE=token and a token (`ray get-auth-token --generate`), or insist: "
            "cluster.insecure: true.",
        )
    if not asks:
        os.environ.update(without)  # in token mode this process would refuse what the cluster's workers say
    return at


def _with_token(path: str) -> dict[str, str]:
    """Return the variables by which Ray finds the token.

    Raises RefusedError for a file that others can read.
    """
    if not path:
        named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & {*os.environ}
        has_token = named or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
        return {"RAY_AUTH_MODE": "token" if has_token else "disabled"}
    path = os.path.expanduser(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise RefusedError(
            f"cluster.token_file: {path}: {error.strerror}", "Copy the cluster's token there, with mode 0600."
        ) from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RefusedError(
            f"cluster.token_file: others may read {path}, or it is not yours", f"chmod 600 {path}"
        )
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


def _probe(address: str, environment: dict[str, str]) -> tuple[int, str]:
    """Ask the cluster's head for a word; returns an exit code of _PROBE and the address as host:port."""
    secrets = () if environment["RAY_AUTH_MODE"] == "token" else ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    inherited = {key: value for key, value in os.environ.items() if key not in secrets}
    quickly = {"RAY_py_gcs_connect_timeout_s": "5"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            env={**inherited, **quickly, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout.strip()
