"""Check that a Ray cluster answers, and is open to nobody without its token.

For `lorad.grants.ray`, whose interpreter has the standard library and Ray.
"""

import os
import signal
import socket
import stat
from typing import Any, NoReturn, Protocol

_LOOK_SECONDS = 1.0  # between two tries
_PROBE_SECONDS = 30
_CONNECT_SECONDS = 3.0
_IS_OPEN = 0  # exit codes of `_ask`; with others there was no answer
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


def reach(pool: _Listener, setup: dict[str, Any], ray: Any) -> str:
    """Have Ray find the token, and return the cluster's address once it answers there.

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
    ray._raylet.Config.initialize("")  # it read the environment when it was imported
    while True:
        code, at = _probe(ray, address, environment)
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
    asks = _probe(ray, at, without)[0] == _NO_TOKEN
    if not asks and not setup.get("insecure"):
        raise RefusedError(
            f"the Ray cluster at {at} asks for no token: whoever reaches its ports runs programs on it",
            "Start it with RAY_AUTH_MODE=token and a token (`ray get-auth-token --generate`), or insist: "
            "cluster.insecure: true.",
        )
    if not asks:
        os.environ.update(without)  # in token mode this process would refuse what the cluster's workers say
        ray._raylet.Config.initialize("")
    return at


def _with_token(path: str) -> dict[str, str]:
    """Return the variables by which Ray finds the token. Raises RefusedError for a file others can read."""
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


def _probe(ray: Any, address: str, environment: dict[str, str]) -> tuple[int, str]:
    """Ask the cluster's head for a word; returns an exit code of `_ask` and the address as host:port.

    A fork asks, since Ray keeps to the first token that it has read. When it is made, this process has one
    other thread, which waits for the end of a connection and holds nothing.
    """
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        _ask(ray, address, environment, writer)
    os.close(writer)
    with open(reader) as answer:
        at = answer.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), at


def _ask(ray: Any, address: str, environment: dict[str, str], writer: int) -> NoReturn:
    """Write the address as host:port, ask there, and exit with what came of it; this process is a fork.

    The client of the cluster's head answers at once, where ray.init tries a wrong token for 20 s.
    """
    code = 1
    try:
        signal.alarm(_PROBE_SECONDS)
        os.dup2(writer, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Ray complains
        os.closerange(3, 1024)  # the pool sees the end of its connection when the grant ends
        if environment["RAY_AUTH_MODE"] != "token":
            for secret in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
                os.environ.pop(secret, None)
        os.environ.update({"RAY_py_gcs_connect_timeout_s": "5", **environment})
        ray._raylet.Config.initialize("")
        if at := ray._private.services.canonicalize_bootstrap_address(address):
            os.write(1, at.encode())
            host, _, port = at.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            try:
                ray._raylet.GcsClient(address=at)
                code = _IS_OPEN
            except ray.exceptions.AuthenticationError:
                code = _NO_TOKEN
    finally:
        os._exit(code)
