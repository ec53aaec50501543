"""Megatron's model as a body: one base per set of model-parallel ranks, one adapter in it at a time."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorad.errors import AdapterRefused
from lorad.limits.check import refuse
from lorad.limits.limit import BackendSetup
from lorad.models.base import add_to
from lorad.rl.loss import TokenLogprobs
from lorad.trainers.megatron.experts import are_met, expert_linears, watched
from lorad.trainers.megatron.forward import hidden_shape, predict
from lorad.trainers.megatron.mounted import Layout, MegatronMounted, Wrapped, unwrap, wrap
from lorad.trainers.megatron.pipeline import Pipeline, Run
from lorad.trainers.megatron.provider import DTYPES, Base, build, check_rotary
from lorad.trainers.megatron.routes import RouteReplay
from lorad.trainers.megatron.targets import chosen, paths_here, trainable_shapes
from lorad.trainers.sharded.body import Body, BodySettings, Mounted, MountKey
from lorad.trainers.sharded.head import Differentiating, RowLoss, ScoringVisit, Visit, likely_of
from lorad.trainers.sharded.rows import Rows
from lorad.trainers.sharded.workers import DataParallel

_LAYOUTS = 16  # how many kinds of adapter are remembered; a kind costs two exports to learn


def open_body(settings: BodySettings) -> Body:
    """Build the model; call it after `workers.join`.

    Raises SpecError for what is beyond the limits of megatron, or what Megatron does not take.
    """
    setup = settings.backend_setup("megatron")
    refuse(setup)
    return MegatronBody(build(settings), settings, setup)


class MegatronBody(Body):
    fuses = True

    def __init__(self, base: Base, settings: BodySettings, setup: BackendSetup) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self._base = base
        self.vocab = int(base.config.vocab_size)
        self.hidden = int(base.config.hidden_size)
        self.max_tokens = int(base.config.max_position_embeddings)
        self._model = base.model
        self.setup = setup
        self.device = torch.device(settings.device)
        self.dtype = DTYPES[settings.dtype]
        self.lockstep = settings.ep > 1
        self._tp = settings.tp
        self._tp_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self.leads = self._tp_rank == 0
        self.has_states = settings.pp == 1
        self.dp = DataParallel(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_group(),
        )
        self.expert_dp = DataParallel(
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
            parallel_state.get_expert_data_parallel_group(),
        )
        self._spreads_experts = settings.ep * settings.tp > 1
        self.expert_times = settings.tp
        reference = reference_of(base.config)
        check_rotary(reference, self._model, base.config)
        self._pipeline = Pipeline(self.device, self.dtype)
        self._paths = paths_here(self._model)
        self._mixtures = [module for module in self._model.modules() if isinstance(module, MoELayer)]
        self._router = RouteReplay(base, self._mixtures, self._pipeline, settings.tp)
        self.routes = self._router.shape
        linears = expert_linears(Path(settings.model), base.config)
        names = list(dict.fromkeys(name.rpartition(".")[0] for name in linears))
        self.experts = names if names or not self._mixtures else None
        self.shapes = trainable_shapes(
            reference,
            linears,
            lambda paths: self._pipeline.anywhere([path in self._paths for path in paths]),
            tied=bool(base.config.tie_word_embeddings),
        )
        self.parameter_count = sum(parameter.numel() for parameter in reference.parameters())
        self._wrapped: list[Wrapped] = []
        self._layouts: dict[MountKey, Layout] = {}
        self._host: list[Tensor] = []

    def replayed(self) -> tuple[int, int, int]:
        return self._router.counts()

    def met(self, rows: Rows) -> Tensor:
        """Return which experts are met: routers choose among those of all ranks."""
        with watched(self._mixtures) as seen:
            self.likely(rows, 1.0, adapter=False)
        tokens = rows.ids.shape[1] * bool(rows.targets.numel())
        last = self._base.config.num_hidden_layers - 1
        # after the last layer no token sees another one's
        met = {
            layer: (routes[rows.predictors] if layer == last else routes[:tokens]).any(0)
            for layer, routes in seen.items()
        }
        return torch.tensor(self._pipeline.anywhere(are_met(self.experts or [], met)), device=self.device)

    def checksum(self) -> str:
        whole = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            if ".adapter." not in name and isinstance(tensor, Tensor) and not name.endswith("_extra_state"):
                whole.update(name.encode())
                add_to(whole, tensor)
        return whole.hexdigest()

    def mount(self, key: MountKey) -> Mounted:
        self.unmount()
        targets = chosen(key, self.shapes)
        on_this_stage = [
            replace(target, path=self._paths[target.path]) for target in targets if target.path in self._paths
        ]
        failure: AdapterRefused | None = None  # every stage is wrapped, or none
        try:
            self._wrapped = wrap(self._model, on_this_stage, key)
        except AdapterRefused as error:
            failure = error
        mine = self._pipeline.rank if self._wrapped else self._pipeline.size
        lowest = self._pipeline.least(-1 if failure else mine)
        if lowest < 0:
            self.unmount()
            raise failure or AdapterRefused("another stage of the pipeline refused the adapter")
        self._pipeline.first_trained = lowest
        mounted = MegatronMounted(
            targets, self._wrapped, key, self._export, self.shapes, self.device, self._pipeline.whole
        )
        if self._spreads_experts:
            mounted.of_experts = mounted.expert_parameters
        try:
            if key not in self._layouts:
                mounted.learn_layout(self._tp_rank)
                self._layouts[key] = mounted.layout
                for oldest in list(self._layouts)[:-_LAYOUTS]:
                    del self._layouts[oldest]
            mounted.layout = self._layouts[key]
        except BaseException:
            self.unmount()
            raise
        return mounted

    def unmount(self) -> None:
        unwrap(self._model, self._wrapped)
        self._wrapped = []

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what Bridge exports while the experts have no adapter."""
        experts = [wrapped for wrapped in self._wrapped if wrapped.target.is_of_expert]
        for wrapped in experts:
            wrapped.put(self._model, wrapped.original)
        try:
            exported = self._base.bridge.export_adapter_weights([self._model], cpu=False, show_progress=False)
            yield from ((each.param_name, each.weight) for each in exported)
        finally:
            for wrapped in experts:
                wrapped.put(self._model, wrapped.wrapper)

    def states(
        self, rows: Rows, *, adapter: bool, train: bool, recompute: bool, visit: Visit | None = None
    ) -> Tensor:
        self._prepare(rows, adapter, train)
        return self._layers(rows, recompute and train, visit)(None)

    def likely(self, rows: Rows, temperature: float, *, adapter: bool) -> TokenLogprobs:
        if self._pipeline.size == 1:
            return super().likely(rows, temperature, adapter=adapter)
        self._prepare(rows, adapter, train=False)
        scoring = ScoringVisit(rows.targets, temperature)
        run = self._layers(rows, recompute=False, visit=scoring)
        self._pipeline.forward(run, hidden_shape(self._model, rows, self._tp), scoring.figures)
        return likely_of(scoring.figures)

    def backward(self, rows: Rows, loss: RowLoss, *, recompute: bool) -> None:
        if self._pipeline.size == 1:
            super().backward(rows, loss, recompute=recompute)
            return
        self._prepare(rows, adapter=True, train=True)
        visit = Differentiating(rows.targets, loss)
        run = self._layers(rows, recompute, visit)
        self._pipeline.backward(run, hidden_shape(self._model, rows, self._tp), visit)
        loss.note(likely_of(visit.figures))

    def _prepare(self, rows: Rows, adapter: bool, train: bool) -> None:
        self._router.begin(rows)
        for wrapped in self._wrapped:
            wrapped.enable(adapter)
        self._model.train(train)
        for layer in self._mixtures:  # which balance their load in training, and refuse tensor parallelism
            layer.eval()
        for wrapped in self._wrapped:
            wrapped.wrapper.get_submodule("adapter").train(train)

    def _layers(self, rows: Rows, recompute: bool, visit: Visit | None) -> Run:
        return lambda below: predict(
            self._model,
            rows,
            self.vocab,
            packed=self._base.packed,
            recompute=recompute,
            tp=self._tp,
            below=below,
            visit=visit,
        )

    def offload(self) -> None:
        """Move the base to the host, whose copy is kept, since the base is frozen."""
        if self.device.type == "cpu":
            return
        parameters = self._base_parameters()
        if not self._host:
            self._host = [parameter.data.to("cpu").pin_memory() for parameter in parameters]
        for parameter, host in zip(parameters, self._host, strict=True):
            parameter.data = host

    def onload(self) -> None:
        for parameter in self._base_parameters():
            parameter.data = parameter.data.to(self.device, non_blocking=True)

    def _base_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self._model.named_parameters() if ".adapter." not in name]


def reference_of(config: Any) -> nn.Module:
    """Return transformers' model without memory, whose parameters and linears have the logical names."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model
