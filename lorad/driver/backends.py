"""Backends of a spec, looked at before anything starts: their names, the keys that are for them, the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from lorad.adapters.targets import leaf
from lorad.config import Backend, Config
from lorad.driver.sample import sampling_of
from lorad.driver.trainers import check_trainer_keys
from lorad.engines import registry as engines
from lorad.engines.install import TRIED, installed_version, is_older
from lorad.engines.remote.dialect import Abilities, Dialect, ServerSettings
from lorad.engines.remote.http import Address, Http, ServerGone, ServerRefused, ServerSilent
from lorad.engines.remote.settings import UNIX, addresses, settings_of
from lorad.engines.setup import HEAD, BaseFacts, longest, server_setup
from lorad.errors import SpecError
from lorad.protocol.servers import ServerSetup
from lorad.specs import Spec
from lorad.trainers import registry as trainers

ANSWER_SECONDS = 15.0
SERVER_NAMES = " or ".join(sorted(engines.SERVERS))
KEYS_OF_SERVERS = ("servers", "tp", "url", "key_file", "admin_key_file")


def check_backends(spec: Spec, config: Config) -> None:
    """What the spec and config.yaml tell alone. Raises SpecError.

    For a backend that is neither built in nor configured, and for keys and modes that are for other backends.
    """
    check_name("trainer.backend", spec.trainer.backend, trainers.BACKENDS, config, "trainer")
    check_name("rollout.backend", spec.rollout.backend, engines.BACKENDS, config, "engine")
    check_trainer_keys(spec)
    if spec.rollout.backend in engines.SERVERS:
        check_server_keys(spec)
    else:
        check_other_keys(spec)


def check_name(key: str, name: str, known: Iterable[str], config: Config, kind: str) -> None:
    """It is one of `known`, or config.yaml gives it a class of this kind (`trainer`, `engine`)."""
    there = {*known, *(other for other, backend in config.backends.items() if getattr(backend, kind))}
    if name not in there:
        others = f"{', '.join(sorted(there))}; config.yaml can name others, each with the class of its {kind}"
        raise SpecError(f"{key}: no backend {name!r}", hint=f"There is {others}.")


def check_other_keys(spec: Spec) -> None:
    """Nothing is there for servers where the engine is none."""
    rollout, backend = spec.rollout, spec.rollout.backend
    default = type(rollout)()
    for key in KEYS_OF_SERVERS:
        if getattr(rollout, key) != getattr(default, key):
            raise SpecError(
                f"rollout.{key}: the {backend} engine is no server, this would do nothing",
                hint=f"Leave it out, or take the rollout.backend that it is for: {SERVER_NAMES}.",
            )
    if rollout.engine_args and backend == "builtin":
        given = ", ".join(rollout.engine_args)
        raise SpecError(
            f"rollout.engine_args: the builtin engine takes none, {given} would do nothing",
            hint="Leave them out, or name the rollout.backend that they are for.",
        )
    if spec.trainer.backend in trainers.RANKED and spec.pool.mode == "timesliced":
        raise SpecError(
            f"pool.mode: timesliced is for an engine that can sleep, the {backend} engine cannot",
            hint=f"Leave it out (auto is resident), or set rollout.backend to {SERVER_NAMES}.",
        )
    if spec.trainer.backend not in trainers.RANKED and spec.pool.mode in ("resident", "timesliced"):
        raise SpecError(
            f"pool.mode: {spec.pool.mode} is for an engine beside the trainer, the {backend} engine is one with it",
            hint=f"Leave it out (auto), or set rollout.backend to {SERVER_NAMES}.",
        )


def check_server_keys(spec: Spec) -> None:
    """Keys of servers that lorad starts, and of those that the user runs, are not mixed."""
    rollout, backend = spec.rollout, spec.rollout.backend
    if spec.pool.mode == "fused":
        raise SpecError(
            f"pool.mode: fused is one process for trainer and engine, but {backend} is a server of its own",
            hint="Leave it out (auto), or set it to resident or timesliced.",
        )
    if rollout.urls and spec.pool.mode == "timesliced":
        raise SpecError(
            "pool.mode: timesliced would put to sleep a server that you run, with everybody else's requests",
            hint="Leave it out (auto is resident), or leave rollout.url out.",
        )
    own = {"servers": rollout.servers > 1, "tp": rollout.tp > 1, "engine_args": bool(rollout.engine_args)}
    if rollout.urls and (given := [key for key, there in own.items() if there]):
        raise SpecError(
            f"rollout.{given[0]}: this is for servers that lorad starts, but rollout.url names one that you run",
            hint=f"Leave out rollout.url, or {', '.join(given)} and start your server with it.",
        )
    keys = {"key_file": rollout.key_file, "admin_key_file": rollout.admin_key_file}
    if not rollout.urls and (given := [key for key, file in keys.items() if file is not None]):
        raise SpecError(
            f"rollout.{given[0]}: keys are of servers that you run, but there is no rollout.url",
            hint="Leave it out: servers that lorad starts listen where nobody else can reach them.",
        )
    for url in rollout.urls:
        check_url(url, rollout.urls)


def check_url(url: str, urls: tuple[str, ...]) -> None:
    """It is `http://host:port` or `unix:/path`, and there once."""
    hint = "Write http://host:port, or unix:/path for a socket."
    if [other.rstrip("/") for other in urls].count(url.rstrip("/")) > 1:
        raise SpecError(f"rollout.url: {url} is there twice", hint="Name each server once.")
    if url.startswith(UNIX):
        if not url.removeprefix(UNIX).startswith("/"):
            raise SpecError(f"rollout.url: {url} is no absolute path", hint=hint)
        return
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise SpecError(f"rollout.url: {url!r} is no address of a server", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise SpecError("rollout.url: it holds a password, and specs are stored", hint="Put it into rollout.key_file.")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise SpecError(f"rollout.url: {url} goes on after the port", hint=hint)


def check_server(
    spec: Spec, config: Config, facts: BaseFacts, model: Path, cwd: Path, *, device: str, stop_token_ids: Sequence[int]
) -> list[str]:
    """The server that `rollout.backend` means is there and can do what the run asks for. Returns warnings.

    Nothing when the backend is no server. Raises SpecError.
    """
    name = spec.rollout.backend
    if name not in engines.SERVERS:
        return []
    if HEAD in {leaf(module) for module in facts.modules}:
        raise SpecError(f"lora.target_modules: {name} takes no adapter on {HEAD}", hint="Exclude it.")
    setup = server_setup(spec, config.backends.get(name, Backend()), facts, cwd)
    dialect = engines.dialect_class(name)()
    settings = settings_of(
        setup,
        model=model,
        dtype=spec.model.dtype,
        device=device,
        threads=1,
        memory_fraction=spec.pool.memory_fraction,
        sleep=spec.pool.mode == "timesliced",
    )
    check_flags(dialect, setup)
    check_sampling(spec, dialect, settings, stop_token_ids)
    if setup.urls:
        for url, address in zip(setup.urls, addresses(setup), strict=True):
            check_attached(spec, dialect, url, address)
        return []
    version = installed_version(name, Path(setup.python))
    older = f"rollout.backend: {name} is {version}; lorad was tried with {TRIED[name]} and newer"
    return [older] if is_older(version, name) else []


def check_flags(dialect: Dialect, setup: ServerSetup) -> None:
    """No flag that is lorad's, nor its beginning, which the servers take for the whole."""
    reserved = {flag.replace("_", "-") for flag in dialect.reserved}
    for given in setup.engine_args:
        flag = given.lstrip("-").replace("_", "-")
        if not flag:
            raise SpecError(f"rollout.engine_args: {given!r} is no flag", hint="Name it without its dashes.")
        if mine := sorted(name for name in reserved if name.startswith(flag)):
            raise SpecError(
                f"rollout.engine_args: {given} is not for you to set: {mine[0]} follows from the run",
                hint=f"Leave it out. Other flags of {dialect.name} are passed on as they are.",
            )


def check_sampling(spec: Spec, dialect: Dialect, settings: ServerSettings, stop_token_ids: Sequence[int]) -> None:
    for greedy in (False, True) if spec.eval.every else (False,):
        if why := dialect.check(sampling_of(spec.rollout, stop_token_ids, greedy=greedy), settings):
            raise SpecError(
                f"rollout: {dialect.name} cannot sample like this: {why}",
                hint="Change that, or take another rollout.backend.",
            )


def check_attached(spec: Spec, dialect: Dialect, url: str, address: Address) -> None:
    """A server that the user runs answers, takes the key, and has room and a way to load adapters."""
    able = asyncio.run(_abilities(dialect, url, address))
    if not able.lora:
        raise SpecError(
            f"rollout.url: the server at {url} takes no adapters while it runs: {'; '.join(able.missing)}",
            hint="Start it with LoRA, or leave rollout.url out: lorad starts one as it needs it.",
        )
    if able.scaled_logprobs not in (None, spec.rollout.temperature != 1.0):
        mode = "processed_logprobs" if spec.rollout.temperature != 1.0 else "raw_logprobs"
        raise SpecError(
            f"rollout.url: the server at {url} gives other log-probabilities than temperature "
            f"{spec.rollout.temperature:g} needs",
            hint=f"Start it with --logprobs-mode {mode}, or leave rollout.url out: lorad starts one as it needs it.",
        )
    if able.max_tokens < longest(spec):
        raise SpecError(
            f"rollout.url: the server at {url} has room for {able.max_tokens} tokens, the run needs {longest(spec)}",
            hint="Start it with a longer context, or lower data.max_prompt_tokens or rollout.max_new_tokens.",
        )


async def _abilities(dialect: Dialect, url: str, address: Address) -> Abilities:
    http = Http(address)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await dialect.abilities(http)
    except ServerRefused as error:
        if error.code in (401, 403):
            raise SpecError(
                f"rollout.key_file: the server at {url} does not take the key: {error.message}",
                hint="rollout.key_file holds its API key, rollout.admin_key_file its admin key if it has one.",
            ) from None
        raise _no_server(dialect, url, error.message) from None
    except (ServerGone, ServerSilent) as error:
        raise _no_server(dialect, url, error.message) from None
    except TimeoutError:
        raise _no_server(dialect, url, f"it said nothing for {ANSWER_SECONDS:.0f} s") from None
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise _no_server(dialect, url, f"its answers are not {dialect.name}'s ({type(error).__name__})") from None
    finally:
        await http.close()


def _no_server(dialect: Dialect, url: str, why: str) -> SpecError:
    return SpecError(
        f"rollout.url: no {dialect.name} server answers at {url}: {why}",
        hint="Is it ready, and is that its address? Without rollout.url lorad starts one itself.",
    )
