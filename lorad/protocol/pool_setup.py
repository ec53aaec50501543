"""The file `pool.json`: what a pool is to be. The daemon writes it, the pool reads it."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lorad.protocol.nodes import NodesSetup

UNIX = "unix:"  # how the address of a server on a Unix socket begins
# distinct versions in one batch of a server: the current one, the one before, some that are served; the base
SERVER_SLOTS = 5
MAX_RUNNING = {"cpu": 32, "cuda": 256}  # samples at once in a server
_Size = Annotated[int, Meta(ge=1)]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantize = Literal["nf4", "fp8"]
Mode = Literal["fused", "resident", "timesliced", "split"]


class ServerSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to start or reach the servers; a part of `pool.json`.

    python: the interpreter of the virtual environment that the server is installed in; "" with `urls`.
    env: added to its environment.
    servers: how many there are, each with the whole model.
    tp: how many devices each has.
    max_rank: the largest rank of the adapters that will be loaded.
    targets: leaf names of the linears that these adapters change, and `experts` where they change experts.
    scaled_logprobs: some temperature is neither 0 nor 1.
    urls: servers that the user runs, instead of starting any (http://host:port or unix:/path).
    key_file, admin_key_file: files that hold one key each.
    engine_args: the user's own flags.
    routes: they say the routes of tokens.
    """

    python: str = ""
    env: dict[str, str] = {}
    servers: Annotated[int, Meta(ge=1)] = 1
    tp: Annotated[int, Meta(ge=1)] = 1
    max_rank: Annotated[int, Meta(ge=1)]
    targets: tuple[str, ...]
    context_length: Annotated[int, Meta(ge=2)]
    scaled_logprobs: bool = False
    urls: tuple[str, ...] = ()
    key_file: str | None = None
    admin_key_file: str | None = None
    engine_args: dict[str, Any] = {}
    routes: bool = False


class RanksSetup(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to start the ranks; a part of `pool.json`.

    There are tp x pp x cp x dp ranks; ep is inside of these.

    python: the interpreter of the virtual environment that the backend is installed in; "" is lorad's own.
    env: added to its environment.
    args: the user's own settings of the backend.
    """

    python: str = ""
    env: dict[str, str] = {}
    tp: _Size = 1
    pp: _Size = 1
    cp: _Size = 1
    dp: _Size = 1
    ep: _Size = 1
    args: dict[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


class PoolSetup(Struct, frozen=True, dict=True, kw_only=True):
    """One base model with a trainer and an engine. The file is 0600: `env` of server and ranks may hold
    secrets.

    pool: the pool's id; empty until it has one.
    model: the model as the spec names it.
    model_path: the directory that `model` resolved to.
    teacher, teacher_path: another model, which is held beside it for its log-probabilities; "" for none.
    dtype: `auto` is the checkpoint's own on a GPU and float32 on the CPU.
    quantize: the format whose grid the base's linears are rounded to.
    trainer_class, engine_class: `module:Class` that replaces what the name means.
    pythonpath: where such modules are found, separated as in PYTHONPATH.
    mode: `fused` shares one base in one process, `resident` keeps a base for each side by side, and
        `timesliced` does the same but lets the engine sleep while the trainer trains. `split` has the
        servers on nodes or devices of their own.
    server: how to start an engine that is a server in a process of its own.
    ranks: how to start a trainer that is made of processes.
    nodes: the machines that it is spread over; None is this one alone.
    device: the kind of device, or the first GPU.
    devices: every GPU, or the slots of a CPU that has several; empty when `device` is the only one.
    rollout_devices: how many of them, the last ones, only servers have.
    deterministic: samples of one call share a batch with no other call's.
    memory_fraction: share of the device's memory that the pool may take.
    owner: the user id of its runs; -1 until a run asks for the pool.
    hang: seconds without a heartbeat after which a process of the trainer counts as hung.
    idle_timeout: seconds without use after which the pool ends by itself while no daemon lives.
    """

    pool: str
    model: str
    model_path: str
    teacher: str = ""
    teacher_path: str = ""
    socket: str = ""
    dtype: Dtype = "auto"
    quantize: Quantize | None = None
    trainer: str = "builtin"
    engine: str = "builtin"
    trainer_class: str | None = None
    engine_class: str | None = None
    pythonpath: str | None = None
    mode: Mode = "fused"
    server: ServerSetup | None = None
    ranks: RanksSetup | None = None
    nodes: NodesSetup | None = None
    threads: Annotated[int, Meta(gt=0)] = 1
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    rollout_devices: Annotated[int, Meta(ge=0)] = 0
    deterministic: bool = True
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    owner: int = -1
    hang: Annotated[float, Meta(gt=0)] = 120.0
    idle_timeout: float = 600.0

    @property
    def has_ranks(self) -> bool:
        """Return whether the trainer has processes of its own."""
        return self.ranks is not None and self.mode != "fused"

    @property
    def names(self) -> tuple[str, ...]:
        """List the devices that the pool holds."""
        return self.devices or (self.device,)

    @property
    def trainer_names(self) -> tuple[str, ...]:
        """List the devices that the trainer is on."""
        return self.names[: len(self.names) - self.rollout_devices]

    @property
    def server_names(self) -> tuple[str, ...]:
        """List the devices that servers are on: the trainer's, unless they have their own."""
        return self.names[-self.rollout_devices :]

    @cached_property
    def key(self) -> str:
        """Return what runs must agree on to share a pool: pools with equal keys are interchangeable.

        Memory stays as the first run asked for it. The key is shown and stored, so that it has digests of the
        environments of server and ranks. It does not have the name of a placement group, the nodes that are
        tried first, and the memory that the first run needs of them.
        """
        parts = []
        for part in (self.server, self.ranks):
            if part is not None:
                environment = json.dumps(part.env, sort_keys=True).encode()
                digest = hashlib.sha256(environment).hexdigest() if part.env else ""
                parts.append(json.dumps({**msgspec.to_builtins(part), "env": digest}, sort_keys=True))
        if (nodes := self.nodes) is not None:
            hosts = tuple(sorted(nodes.hosts, key=lambda host: host.name))
            nodes = replace(nodes, group="", hosts=hosts, warm=(), memory=0)
        return json.dumps(
            [
                *(self.model_path, self.dtype, self.trainer, self.engine),
                *(self.mode, self.threads, self.device),
                *(self.trainer_class, self.engine_class, self.pythonpath, self.deterministic, self.owner),
                *parts,
                *self.devices,
                *([f"rollout {self.rollout_devices}"] if self.rollout_devices else []),
                *([f"quantize {self.quantize}"] if self.quantize else []),
                *([f"teacher {self.teacher_path}"] if self.teacher_path else []),
                *([msgspec.json.encode(nodes).decode()] if nodes else []),
            ]
        )

    @property
    def kind(self) -> str:
        """Return a text that is equal for setups of which one can be `widened` for the other."""
        if self.server is None:
            return self.key
        return replace(self, server=replace(self.server, max_rank=0, context_length=0)).key

    def takes(self, other: PoolSetup) -> bool:
        """Check whether a run for `other` may join; it need not use all rank, context or the teacher."""
        if self.teacher_path and not other.teacher_path:
            return self.takes(other.taught_by(self))
        if self.server is None or other.server is None:
            return self.key == other.key
        return self.key == other.widened(self).key == self.widened(other).key

    def serves(self, other: PoolSetup) -> bool:
        """Check whether this pool can serve versions of a run that asks for `other`.

        Base and backends count; threads, determinism, the teacher and which devices of one kind do not.
        """
        if (self.device == "cpu") != (other.device == "cpu") or len(self.names) != len(other.names):
            return False
        mine = replace(
            other,
            threads=self.threads,
            deterministic=self.deterministic,
            device=self.device,
            devices=self.devices,
        )
        return self.takes(mine.taught_by(self))

    def taught_by(self, other: PoolSetup | None) -> PoolSetup:
        """Return the same pool with the teacher of `other`, if there is one."""
        teacher, path = ("", "") if other is None else (other.teacher, other.teacher_path)
        return replace(self, teacher=teacher, teacher_path=path)

    def widened(self, other: PoolSetup) -> PoolSetup:
        """Widen the server so that it takes runs for `other`, too, if nothing else differs."""
        mine = self.server
        theirs = other.server
        if mine is None or theirs is None:
            return self
        rank = max(mine.max_rank, theirs.max_rank)
        length = max(mine.context_length, theirs.context_length)
        wide = replace(self, server=replace(mine, max_rank=rank, context_length=length))
        other = replace(other, server=replace(theirs, max_rank=rank, context_length=length))
        return wide if wide.key == other.key else self
