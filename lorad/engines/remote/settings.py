"""Make the settings and the addresses of servers from the setup of a pool."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from lorad.adapters.targets import EXPERTS, leaf
from lorad.box.machine import read_machine
from lorad.box.private import read_key
from lorad.engines.remote.dialect import ServerSettings
from lorad.engines.remote.http import Address
from lorad.errors import SpecError
from lorad.models.facts import read_facts
from lorad.protocol.pool_setup import MAX_RUNNING, SERVER_SLOTS, UNIX, ServerSetup

MAX_VERSIONS = 64
_LEAST_VERSIONS = 8
_HOST_SHARE = 4
_COPIES = 8
"""A quarter of the host's memory is for versions: each number has 4 bytes in a file, which lies in memory,
and at most as many in the server's own copy."""


def settings_of(
    setup: ServerSetup,
    *,
    model: Path,
    dtype: str,
    device: str,
    threads: int,
    memory_fraction: float,
    sleep: bool,
    devices: int = 1,
) -> ServerSettings:
    """Make the settings of the first server; see `local_settings` for the others."""
    most_on_a_device = -(-setup.servers // max(1, devices // setup.tp))
    # fewer than MAX_VERSIONS may be loaded at once where they are large
    facts = read_facts(model)
    shapes = {**facts.linears, **(facts.experts if EXPERTS in setup.targets else {})}
    through = sum(sum(shape) for name, shape in shapes.items() if leaf(name) in setup.targets)
    version = setup.max_rank * through * _COPIES * setup.servers
    room = read_machine().memory // _HOST_SHARE
    return ServerSettings(
        model=model,
        dtype=dtype,
        device=device,
        context_length=setup.context_length,
        max_rank=setup.max_rank,
        targets=setup.targets,
        slots=SERVER_SLOTS - 1,  # without the base
        max_versions=max(_LEAST_VERSIONS, min(MAX_VERSIONS, room // max(1, version))),
        memory_fraction=memory_fraction / most_on_a_device,
        threads=threads,
        tp=setup.tp,
        devices=devices,
        max_running=MAX_RUNNING[device.partition(":")[0]],
        scaled_logprobs=setup.scaled_logprobs,
        sleep=sleep,
        engine_args=setup.engine_args,
        routes=read_facts(model).routes if setup.routes else None,
    )


def local_settings(settings: ServerSettings, index: int) -> ServerSettings:
    """Return a server's settings: it has the next `tp` devices, from the first again where they end."""
    kind, _, first = settings.device.partition(":")
    if not first:
        return settings
    place = index % max(1, settings.devices // settings.tp) * settings.tp
    return replace(settings, device=f"{kind}:{int(first) + place}")


def node_settings(settings: ServerSettings, index: int, node: str, devices: Sequence[str]) -> ServerSettings:
    """Return the settings of a node's server `index`. Raises SpecError for fewer devices than it needs."""
    if settings.device == "cpu":
        return settings
    if len(devices) < settings.tp:
        raise SpecError(
            f"a server needs {settings.tp} devices, and {node} gave {len(devices)}",
            key="rollout.tp",
            hint="A server must be on one node: lower rollout.tp, or ask for nodes with more devices.",
        )
    place = index % (len(devices) // settings.tp) * settings.tp
    return replace(settings, device="cuda:0", visible=tuple(devices[place : place + settings.tp]))


def addresses(setup: ServerSetup) -> list[Address]:
    """List the addresses of servers that the user runs. Raises SpecError for an unreadable key file."""
    keys = []
    for name, file in (("key_file", setup.key_file), ("admin_key_file", setup.admin_key_file)):
        try:
            keys.append(read_key(file) if file else "")
        except SpecError as error:
            raise SpecError(error.problem, key=f"rollout.{name}", hint=error.hint) from None
    key, admin = keys
    return [
        Address(socket=Path(url.removeprefix(UNIX)), key=key, admin_key=admin)
        if url.startswith(UNIX)
        else Address(url=url, key=key, admin_key=admin)
        for url in setup.urls
    ]
