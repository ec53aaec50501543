"""A Hugging Face causal LM that FSDP2 shards over ranks, with adapters by PEFT that FSDP does not know."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lorad.adapters.targets import HEAD, renamed
from lorad.errors import SpecError
from lorad.limits.arguments import ATTENTION
from lorad.limits.check import refuse
from lorad.limits.limit import BackendSetup
from lorad.models.experts import replayed
from lorad.models.facts import read_facts
from lorad.models.hf.opening import read_config
from lorad.trainers.fsdp import architecture, experts, weights
from lorad.trainers.fsdp.adapter import AdapterRoom
from lorad.trainers.fsdp.architecture import Recompute, computes_alike, keeps_apart, probe
from lorad.trainers.fsdp.ulysses import Ulysses
from lorad.trainers.sharded.body import Body, BodySettings, Mounted, MountKey
from lorad.trainers.sharded.head import Head, Visit
from lorad.trainers.sharded.rows import Rows, cut
from lorad.trainers.sharded.workers import DataParallel

log = logging.getLogger("lorad.fsdp")

_UNBOUNDED = 1 << 20  # tokens, where a config names no limit


def open_body(settings: BodySettings) -> "FsdpBody":
    """Open the body of this rank, one of all that are data-parallel. Collective.

    Neighbours, `settings.cp` of them, read the same rows. `settings.args` may have `attn_implementation`, by
    transformers' names; without it there is FlashAttention where that works, else sdpa. Raises SpecError for
    what is beyond the limits of fsdp, and for a model that cannot be loaded.
    """
    setup = settings.backend_setup("fsdp")
    refuse(setup)
    return FsdpBody(settings, setup)


class FsdpBody(Body):
    """A base whose weights are gathered layer by layer when needed, or are whole; adapters are whole.

    The base is always in evaluation mode, so that only the adapter has dropout.

    Attributes:
        model: The module of transformers, which an engine may share where the base is whole.
        linears: The base's module of each linear, without any adapter, by logical name.
    """

    lockstep = True

    def __init__(self, settings: BodySettings, setup: BackendSetup) -> None:
        self.setup = setup
        directory = Path(settings.model)
        self.device = torch.device(settings.device)
        self.dtype = getattr(torch, settings.dtype)
        self._world: Any = dist.group.WORLD
        self.dp = DataParallel(dist.get_rank(), dist.get_world_size(), self._world)
        attention = setup.args.get(ATTENTION)
        kinds = [attention] if attention else architecture.attentions(self.dtype, self.device)
        kinds = ["sdpa"] if settings.cp > 1 else kinds
        self.model = architecture.empty_model(read_config(directory), self.dtype, kinds)
        self._text = self.model.config.get_text_config()
        self.vocab = int(self._text.vocab_size)
        self.hidden = int(self._text.hidden_size)
        self.max_tokens = int(getattr(self._text, "max_position_embeddings", None) or _UNBOUNDED)
        self.parameter_count = sum(parameter.numel() for parameter in self.model.parameters())
        self._layers = architecture.decoder_layers(self.model)
        self._is_whole = settings.whole
        self.may_forget = (
            (self._is_whole or hasattr(self.model, "reset_iter_state"))  # since torch 2.13
            and self.dp.size == 1
            and self.device.type == "cuda"
        )
        self._prepare(self._layers, read_facts(directory).linears)
        rounding = weights.Rounding(settings.quantize, frozenset(self._room.shapes) - {HEAD})
        weights.fill(self.model, self._mixtures, directory, self.device, rounding)
        self._on_host: list[Tensor] = []  # the base, in the order in which modules are asked for it
        self._ulysses: Ulysses | None = None
        self._has_positions = architecture.takes(self.model, "position_ids")
        with self._room.reached():
            mixes = not keeps_apart(self._logits, self.vocab, self.device)
            mixes_anywhere = self.dp.most(int(mixes), self.device) > 0
            self.packs = not mixes_anywhere and architecture.may_pack(self.model)
            if (size := settings.cp) > 1:
                groups = [dist.new_group(range(n, n + size)) for n in range(0, self.dp.size, size)]
                self.cp = DataParallel(self.dp.rank % size, size, groups[self.dp.rank // size])
                self._cut_sequences()
        self.shapes = self._room.shapes
        self.linears: dict[str, nn.Module] = {
            name: linear.get_base_layer()
            for name, linear in self._room.linears.items()
            if name in self.shapes
        }
        log.info(
            "%d linears; sequences %s",
            len(self.shapes),
            "share rows" if self.packs else "have rows of their own",
        )

    def _prepare(self, layers: list[Any], stored: Iterable[str]) -> None:
        """Make room for adapters, and cut the base over the ranks unless it stays whole."""
        self._recompute = Recompute()
        self._recompute.install(layers)
        self._mixtures = experts.experts_in(layers, self.model)
        if self._mixtures:
            experts.compute_experts(self.model)
        self.experts = [
            f"{path}.{expert}"
            for path, module in self._mixtures.items()
            for expert in range(module.num_experts)
        ]
        self.routes = experts.route_shape(self.model, self._mixtures)
        self._router = experts.Router(self.model, self._mixtures if self.routes else {})
        shapes = architecture.linear_shapes(self.model, layers)
        self._room = AdapterRoom(self.model, shapes, renamed(shapes, stored), self._mixtures)
        if not self._is_whole:
            mesh = DeviceMesh.from_group(self._world, self.device.type)
            ignored = self._room.parameters()
            for module in (*layers, self.model):
                fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        self._room.clear()

    def _cut_sequences(self) -> None:
        """Attend over `cp` from now on. Collective.

        Raises SpecError for a model that mixes tokens by other means than attention, whose scores change so.
        """
        row = probe(self.vocab, 4 * self.cp.size + 1, self.device)
        part = cut(row, self.cp)
        assert part.cut is not None
        with torch.no_grad():
            whole = self._logits(row.ids, row.positions)
            self._ulysses = Ulysses(self.cp)
            self._ulysses.install(self._text)
            self._ulysses.starts = part.cut.starts
            mine = self._logits(part.ids, part.positions)[: part.tokens]
        begin = self.cp.rank * part.ids.shape[1]
        wrong = not computes_alike(mine, whole[begin : begin + part.tokens])
        if self.dp.most(int(wrong), self.device):
            raise SpecError(
                f"sequences of {self._text.model_type} cannot be cut over ranks: its layers pass on more "
                "from token to token than attention does",
                key="trainer.cp",
                hint="Set it to 1; activation_checkpointing: true saves memory, too.",
            )

    def forget(self) -> None:
        if not self._is_whole:
            self.model.reset_iter_state()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Compute as the checkpoint says inside the block: no adapter acts, and no routes are replayed."""
        self._router.replay = None
        self._recompute.on = False
        with self._room.acting(False, False):
            yield

    def checksum(self) -> str:
        return weights.checksum(self.model)

    def row_norms(self, modules: Sequence[str]) -> dict[str, np.ndarray]:
        return self._room.row_norms(modules)

    def mount(self, key: MountKey) -> Mounted:
        return self._room.put(key, self.dtype, self.device)

    def unmount(self) -> None:
        self._room.clear()

    def states(
        self, rows: Rows, *, adapter: bool, train: bool, recompute: bool, visit: Visit | None = None
    ) -> Tensor:
        """Return the decoder's states. Its first token alone goes on to the output layer, after the visit.

        That way FSDP sees the model's end, and so the backward that is to come.
        """
        decoder = architecture.decoder_of(self.model)
        captured = []
        decode = decoder.forward

        def through(*args: Any, **kwargs: Any) -> Any:
            output = decode(*args, **kwargs)
            states = output.last_hidden_state[0].index_select(0, rows.predictors)
            first = output.last_hidden_state[:, :1]
            if visit is not None:

                def scores(part: Tensor) -> Tensor:
                    """Return the logits [m, vocab] of states [m, hidden], as if the decoder had made them.

                    It works amid a forward alone: past FSDP's hooks, by the weights that are gathered there.
                    """
                    output.last_hidden_state = part[None]
                    decoder.forward = lambda *_, **__: output
                    ids = torch.zeros((1, len(part)), dtype=torch.int64, device=part.device)
                    logits: Tensor = self.model.forward(input_ids=ids, use_cache=False).logits[0]
                    return logits

                visit(states, Head(scores, self.vocab))
                decoder.forward = through
            captured.append(states)
            output.last_hidden_state = first
            return output

        self._recompute.on = recompute
        if rows.cut is not None and self._ulysses is not None:
            self._ulysses.starts = rows.cut.starts
        self._router.replay = None if rows.routes is None else replayed(rows.routes, self.device)
        self._router.tokens = rows.tokens
        decoder.forward = through
        try:
            with self._room.acting(adapter, train):
                seen = self._logits(rows.ids, rows.positions)
        finally:
            del decoder.forward
        states: Tensor = captured[0]
        return states + 0 * seen[0, :1].to(states.dtype) if torch.is_grad_enabled() else states

    def replayed(self) -> tuple[int, int, int]:
        replay = self._router.replay
        return replay.counts(slice(self._router.tokens)) if replay is not None else (0, 0, 0)

    def met(self, rows: Rows) -> Tensor:
        with experts.watched(self._mixtures) as seen, torch.no_grad():
            self.states(rows, adapter=False, train=False, recompute=False)
        last = set(self._layers[-1].modules())
        flags = []
        row = rows if rows.cut is None else rows.cut.whole
        seeing = rows.tokens * bool(row.targets.numel())
        for path, module in self._mixtures.items():
            (index,) = seen[path]
            # after the last layer no token sees another one's
            mine = index[rows.predictors] if module in last else index[:seeing]
            flags.append(torch.bincount(mine.reshape(-1), minlength=module.num_experts) > 0)
        return torch.cat(flags)

    def offload(self) -> None:
        """Move the base to the host, which keeps its copy from then on, as the base never changes."""
        if self._on_host:
            on_host = iter(self._on_host)
            self._move(lambda _: next(on_host))
            return
        keep = _pinned if self.device.type == "cuda" else Tensor.cpu

        def copy_on_host(tensor: Tensor) -> Tensor:
            self._on_host.append(keep(tensor))
            return self._on_host[-1]

        self._move(copy_on_host)

    def onload(self) -> None:
        self._move(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the model's logits, [tokens, vocab]."""
        more: dict[str, Any] = {"position_ids": positions} if self._has_positions else {}
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **more).logits[0]
        return logits

    def _move(self, where: Callable[[Tensor], Tensor]) -> None:
        """Move the base's shards and buffers, but not adapters, whose memory slots share."""
        stays = [tensor for parameter in self._room.parameters() for tensor in (parameter, parameter.grad)]
        staying = {id(tensor) for tensor in stays}
        self.model._apply(lambda tensor: tensor if id(tensor) in staying else where(tensor))


def _pinned(tensor: Tensor) -> Tensor:
    """Copy a GPU's tensor to pinned host memory, of which the GPU copies at full speed meanwhile."""
    copy = tensor.to("cpu")
    if isinstance(copy, DTensor):
        copy._local_tensor = copy._local_tensor.pin_memory()  # a DTensor cannot be pinned itself
        return copy
    return copy.pin_memory()
