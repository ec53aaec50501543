"""The ranks of one trainer: how they meet, pass calls on, and add up over data-parallel ranks."""

import datetime
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore

T = TypeVar("T")

_IDLE = datetime.timedelta(days=3650)  # between calls: gloo would end a trainer that waits for half an hour

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def join(rank: int, world: int, meeting: Path, device: torch.device) -> "Calls":
    """Meet the other ranks over a file that did not exist before; from then on `torch.distributed` is ready.

    gloo listens on the loopback interface alone. A file needs no port that others could connect to.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(_backend(device), init_method=f"file://{meeting}", rank=rank, world_size=world)
    return Calls(dist.new_group(backend="gloo", timeout=_IDLE))


def alone(device: torch.device) -> "Calls":
    """Be the only rank, in this process; from then on `torch.distributed` is ready."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not dist.is_initialized():
        dist.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
    return Calls(dist.group.WORLD)


def join_at(
    rank: int, world: int, place: tuple[str, int], listener: socket.socket | None, device: torch.device
) -> "Calls":
    """Meet the other ranks at a port of rank 0's machine, to which the listener of rank 0 is bound.

    Nothing on this network is encrypted: it must be private.
    """
    fd = None if listener is None else listener.detach()
    store = TCPStore(*place, world, is_master=fd is not None, wait_for_workers=False, master_listen_fd=fd)
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world)
    return Calls(dist.new_group(backend="gloo", timeout=_IDLE))


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@dataclass(frozen=True)
class Calls:
    """Passes calls from rank 0 to the other ranks."""

    group: dist.ProcessGroup | None

    def spread(self, payload: bytes | bytearray | None) -> bytes:
        """Pass bytes from rank 0 to all; the other ranks give None and wait."""
        size = torch.tensor([0 if payload is None else len(payload)])
        dist.broadcast(size, 0, group=self.group)
        if payload is None:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        else:
            buffer = torch.from_numpy(np.frombuffer(bytearray(payload), np.uint8))
        dist.broadcast(buffer, 0, group=self.group)
        return buffer.numpy().tobytes()

    def all_agree(self, is_fine: bool) -> bool:
        """Return whether all is fine on every rank. Collective."""
        flag = torch.tensor([int(is_fine)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def texts(self, mine: str) -> list[str]:
        """Gather the ranks' texts, which have the same length everywhere. Collective."""
        said = torch.from_numpy(np.frombuffer(mine.encode(), np.uint8).copy())
        parts = [torch.empty_like(said) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, said, group=self.group)
        return [bytes(part.numpy()).decode() for part in parts]


@dataclass(frozen=True)
class DataParallel:
    """The ranks with the same part of the base and other samples."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def most(self, number: int, device: torch.device) -> int:
        """Return the greatest of the ranks' numbers."""
        if self.size == 1:
            return number
        greatest = torch.tensor([number], device=device)
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.group)
        return int(greatest.item())

    def part(self, flat: Tensor) -> Tensor:
        """Return this rank's equal share of a vector, whose length is a multiple of `size`, as a view."""
        share = flat.numel() // self.size
        return flat[self.rank * share : (self.rank + 1) * share]

    def reduced_part(self, flat: Tensor) -> Tensor:
        """Return this rank's share of the sum over ranks. With one rank it is `flat` itself."""
        if self.size == 1:
            return flat
        mine = torch.empty_like(self.part(flat))
        _reduce_scatter(mine, flat, group=self.group)
        return mine

    def join_parts(self, part: Tensor, flat: Tensor) -> None:
        """Fill `flat` with the shares of all ranks. With one rank `part` is `flat` itself already."""
        if self.size > 1:
            _all_gather(
                flat,
                part.clone() if part.data_ptr() == self.part(flat).data_ptr() else part,
                group=self.group,
            )
