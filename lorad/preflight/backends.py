"""Look at the backends of a spec before anything starts: their names, and the keys that are for them."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from lorad.backends import registry
from lorad.backends.setup import backend_setup
from lorad.box.config import Config
from lorad.errors import SpecError
from lorad.limits.arguments import OWN_BASE
from lorad.limits.check import refuse
from lorad.protocol.pool_setup import UNIX
from lorad.servers.table import NAMES, SERVERS
from lorad.spec.model import Spec

_KEYS_OF_SERVERS = ("servers", "tp", "url", "key_file", "admin_key_file")


def check_backends(spec: Spec, config: Config) -> None:
    """Check the names of the backends, and the keys and modes that belong to them. Raises SpecError."""
    _check_name("trainer.backend", spec.trainer.backend, registry.TRAINERS, config, "trainer")
    _check_name("rollout.backend", spec.rollout.backend, registry.ENGINES, config, "engine")
    refuse(backend_setup(spec))
    if spec.rollout.backend in SERVERS:
        _check_server_keys(spec)
    else:
        rollout = spec.rollout
        backend = spec.rollout.backend
        default = type(rollout)()
        for key in _KEYS_OF_SERVERS:
            if getattr(rollout, key) != getattr(default, key):
                raise SpecError(
                    f"the {backend} engine is no server, this would do nothing",
                    key=f"rollout.{key}",
                    hint=f"Leave it out, or take the rollout.backend that it is for: {NAMES}.",
                )
        if rollout.engine_args and backend in {"builtin", *OWN_BASE}:
            arguments = ", ".join(rollout.engine_args)
            raise SpecError(
                f"the {backend} engine takes none, {arguments} would do nothing",
                key="rollout.engine_args",
                hint="Leave them out, or name the rollout.backend that they are for.",
            )


def _check_name(key: str, name: str, builtin: Iterable[str], config: Config, kind: str) -> None:
    """Check that a trainer or an engine is built in, or has a class in config.yaml. Raises SpecError."""
    names = {*builtin, *(other for other, backend in config.backends.items() if getattr(backend, kind))}
    if name not in names:
        others = f"{', '.join(sorted(names))}; config.yaml can name others, each with the class of its {kind}"
        raise SpecError(f"no backend {name!r}", key=key, hint=f"There is {others}.")


def _check_server_keys(spec: Spec) -> None:
    """Check addresses, and that keys are either of lorad's servers or of the user's. Raises SpecError."""
    rollout = spec.rollout
    if rollout.urls and spec.pool.mode == "timesliced":
        raise SpecError(
            "timesliced would put to sleep a server that you run, with everybody else's requests",
            key="pool.mode",
            hint="Leave it out (auto is resident), or leave rollout.url out.",
        )
    own = {"servers": rollout.servers > 1, "tp": rollout.tp > 1, "engine_args": bool(rollout.engine_args)}
    if rollout.urls and (misplaced := [key for key, is_set in own.items() if is_set]):
        raise SpecError(
            "this is for servers that lorad starts, but rollout.url names one that you run",
            key=f"rollout.{misplaced[0]}",
            hint=f"Leave out rollout.url, or {', '.join(misplaced)} and start your server with it.",
        )
    keys = {"key_file": rollout.key_file, "admin_key_file": rollout.admin_key_file}
    if not rollout.urls and (misplaced := [key for key, file in keys.items() if file is not None]):
        raise SpecError(
            "keys are of servers that you run, but there is no rollout.url",
            key=f"rollout.{misplaced[0]}",
            hint="Leave it out: servers that lorad starts listen where nobody else can reach them.",
        )
    form = "Write http://host:port, or unix:/path for a socket."
    for url in rollout.urls:
        if [other.rstrip("/") for other in rollout.urls].count(url.rstrip("/")) > 1:
            raise SpecError(f"{url} is there twice", key="rollout.url", hint="Name each server once.")
        if url.startswith(UNIX):
            if not url.removeprefix(UNIX).startswith("/"):
                raise SpecError(f"{url} is no absolute path", key="rollout.url", hint=form)
            continue
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            whole = False
        if not whole:
            raise SpecError(f"{url!r} is no address of a server", key="rollout.url", hint=form)
        if parts.username is not None or parts.password is not None:
            problem = "it holds a password, and specs are stored"
            raise SpecError(problem, key="rollout.url", hint="Put it into rollout.key_file.")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise SpecError(f"{url} has more after the port", key="rollout.url", hint=form)
