"""Look at the server that a run samples from before anything starts.

Imported late: it brings an HTTP client.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lorad.backends import registry
from lorad.backends.installed import installed_version, is_older
from lorad.backends.setup import longest, server_setup
from lorad.box.config import Backend, Config
from lorad.driver.sample import sampling_of
from lorad.engines.remote.dialect import Abilities, Dialect
from lorad.engines.remote.http import Address, Http, ServerGone, ServerRefused, ServerSilent
from lorad.engines.remote.settings import addresses, settings_of
from lorad.errors import SpecError
from lorad.preflight.trainers import ON_NODES
from lorad.protocol.preflight import BaseFacts
from lorad.servers.table import SERVERS
from lorad.spec.model import Spec

_ANSWER_SECONDS = 15.0
_ROUNDING = ("quantization", "torchao-config")
"""Flags by which servers round weights, W8A8 among the ways, and beginnings of some."""


def check_server(
    spec: Spec,
    config: Config,
    facts: BaseFacts,
    model: Path,
    cwd: Path,
    *,
    device: str,
    stops: Sequence[int],
    elsewhere: bool,
) -> list[str]:
    """Check that the server is installed and can do what the run asks for. Returns warnings; raises
    SpecError.

    elsewhere: servers are on nodes of a cluster, whose interpreters need not be on this machine.
    """
    name = spec.rollout.backend
    setup = server_setup(spec, config.backends.get(name, Backend()), facts, cwd)
    dialect = registry.dialect_class(name)()
    settings = settings_of(
        setup,
        model=model,
        dtype=spec.model.dtype,
        device=device,
        threads=1,
        memory_fraction=spec.pool.memory_fraction,
        sleep=spec.pool.mode == "timesliced",
    )
    # prefixes of flags, too: the servers take them for the whole
    reserved = {flag.replace("_", "-") for flag in dialect.reserved}
    for argument in setup.engine_args:
        flag = argument.lstrip("-").replace("_", "-")
        if not flag:
            raise SpecError(
                f"{argument!r} is no flag", key="rollout.engine_args", hint="Name it without its dashes."
            )
        if mine := sorted(name for name in reserved if name.startswith(flag)):
            raise SpecError(
                f"{argument} is not for you to set: {mine[0]} follows from the run",
                key="rollout.engine_args",
                hint=f"Leave it out. Other flags of {dialect.kind.name} are passed on as they are.",
            )
        if any(name.startswith(flag) or flag.startswith(name) for name in _ROUNDING):
            raise SpecError(
                f"by {argument} {dialect.kind.name} rounds weights or activations, and samples from another "
                "model than the trainer trains on",
                key="rollout.engine_args",
                hint="Leave it out. model.quantize rounds a base for the builtin engine and its trainer.",
            )
    for greedy in (False, True) if spec.eval.every else (False,):
        if why := dialect.check(sampling_of(spec.rollout, stops, greedy=greedy), settings):
            problem = f"{dialect.kind.name} cannot sample like this: {why}"
            raise SpecError(problem, key="rollout", hint="Change that, or take another rollout.backend.")
    if setup.urls:
        for url, address in zip(setup.urls, addresses(setup), strict=True):
            _check_attached(spec, dialect, url, address)
        return []
    if elsewhere and not Path(setup.python).exists():
        return [f"rollout.backend: {setup.python} {ON_NODES}"]
    version = installed_version(name, Path(setup.python))
    older = f"rollout.backend: {name} is {version}; lorad was tried with {SERVERS[name].tried} and newer"
    return [older] if is_older(version, name) else []


def _check_attached(spec: Spec, dialect: Dialect, url: str, address: Address) -> None:
    """Check that a user's server answers, takes the key, and can load adapters. Raises SpecError."""
    able = asyncio.run(_abilities(dialect, url, address))
    if not able.lora:
        raise SpecError(
            f"the server at {url} takes no adapters while it runs: {'; '.join(able.missing)}",
            key="rollout.url",
            hint="Start it with LoRA, or leave rollout.url out: lorad starts one as it needs it.",
        )
    if able.scaled_logprobs not in (None, spec.rollout.temperature != 1.0):
        mode = "processed_logprobs" if spec.rollout.temperature != 1.0 else "raw_logprobs"
        raise SpecError(
            f"the server at {url} gives other log-probabilities than temperature "
            f"{spec.rollout.temperature:g} needs",
            key="rollout.url",
            hint=f"Start it with --logprobs-mode {mode}, or leave rollout.url out: lorad starts one as it "
            "needs it.",
        )
    if able.max_tokens < longest(spec):
        raise SpecError(
            f"the server at {url} has room for {able.max_tokens} tokens, the run needs {longest(spec)}",
            key="rollout.url",
            hint="Start it with a longer context, or lower data.max_prompt_tokens or rollout.max_new_tokens.",
        )


async def _abilities(dialect: Dialect, url: str, address: Address) -> Abilities:
    http = Http(address)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await dialect.abilities(http)
    except ServerRefused as error:
        if error.code in (401, 403):
            raise SpecError(
                f"the server at {url} does not take the key: {error.message}",
                key="rollout.key_file",
                hint="rollout.key_file holds its API key, rollout.admin_key_file its admin key if it has "
                "one.",
            ) from None
        raise _no_server(dialect, url, error.message) from None
    except (ServerGone, ServerSilent) as error:
        raise _no_server(dialect, url, error.message) from None
    except TimeoutError:
        raise _no_server(dialect, url, f"it said nothing for {_ANSWER_SECONDS:.0f} s") from None
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise _no_server(
            dialect, url, f"its answers are not {dialect.kind.name}'s ({type(error).__name__})"
        ) from None
    finally:
        await http.close()


def _no_server(dialect: Dialect, url: str, why: str) -> SpecError:
    return SpecError(
        f"no {dialect.kind.name} server answers at {url}: {why}",
        key="rollout.url",
        hint="Is it ready, and is that its address? Without rollout.url lorad starts one itself.",
    )
