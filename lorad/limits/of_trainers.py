"""What trainers cannot do."""

from typing import Any

from lorad.adapters.targets import leaf
from lorad.limits.arguments import (
    ADAPTS,
    ATTENTION,
    AXES,
    AXES_OF,
    COMPOSITE,
    FUSES,
    NEEDS_TE,
    RANKED,
    SPLITS,
    UNBRIDGED,
    fused,
)
from lorad.limits.limit import BackendLimit, BackendSetup

_WITH_DORA = ("builtin", "fsdp")
_RANK_NAMES = " or ".join(sorted(RANKED))
_LEAVE_EXPERTS = 'with lora.exclude_modules: ["*.experts.*"]'


def own_fields(s: Any, dtype: object, *, pads: bool) -> dict[str, object]:
    """Return the fields of Megatron's configuration that lorad decides.

    No dropout but the adapter's, no loss but the run's, gradients that autograd keeps, and routers whose
    choice can be replaced.

    s: a BackendSetup, or a BodySettings, which says the same.
    dtype: torch's, of weights and of what stages send.
    pads: whether the vocabulary has to be padded.
    """
    return {
        "tensor_model_parallel_size": s.tp,
        "pipeline_model_parallel_size": s.pp,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": s.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": s.dtype == "bfloat16",
        "fp16": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_fusion": False,
        "gradient_accumulation_fusion": False,
        "should_pad_vocab": pads,
        "make_vocab_size_divisible_by": 1,
        "use_cpu_initialization": s.device == "cpu",
    }


_OWN = {*own_fields(BackendSetup(), None, pads=False), "transformer_layer_spec"}


def _foreign_axis(s: BackendSetup) -> tuple[str, str] | None:
    """Return an axis that the trainer does not have, and the trainers that have it."""
    for axis in AXES:
        if getattr(s, axis) > 1 and axis not in AXES_OF.get(s.trainer, ()):
            return axis, " or ".join(sorted(name for name, axes in AXES_OF.items() if axis in axes))
    return None


def _fitting_ranks(s: BackendSetup) -> str:
    """Return the ranks nearby that can be cut, where the adapter's cannot."""
    if s.rank % s.tp == 0:
        return ""
    upper = s.rank + s.tp - s.rank % s.tp
    return f"{upper - s.tp} or {upper}" if upper > s.tp else str(upper)


def _half_fused(s: BackendSetup) -> tuple[str, str] | None:
    """Return a linear that is adapted without others of the same product, and the names of all of these."""
    modules = s.adapter.modules if s.adapter and s.lora_type == "lora" else ()
    for linears in fused(modules):
        adapted = [linear for linear in linears if linear in modules]
        if len(adapted) < len(linears):
            return adapted[0], ", ".join(map(leaf, linears))
    return None


def _grouped_experts(s: BackendSetup) -> tuple[str, ...]:
    """Return the adapted experts where Megatron computes all of a layer in one product."""
    on_gpu = s.device != "cpu" and s.dtype != "float32"  # Transformer Engine has no fp32 attention
    is_grouped = on_gpu and s.args.get("moe_grouped_gemm") is not False
    return s.adapter.experts if s.adapter and is_grouped else ()


def _foreign_experts(s: BackendSetup) -> tuple[str, ...]:
    """Return the adapted experts where the trainer adapts none of this model's."""
    kind = s.model.model_type if s.model else ""
    return s.adapter.experts if s.adapter and kind not in ADAPTS.get(s.trainer, (kind,)) else ()


_ANY = (
    BackendLimit(
        key="trainer.{it[0]}",
        breaks=lambda s: s.trainer not in RANKED and _foreign_axis(s),
        why="the {s.trainer} trainer is one process",
        hint="Set it to 1, or take a trainer.backend with ranks: {it[1]}.",
    ),
    BackendLimit(
        key="trainer.backend_args",
        breaks=lambda s: s.trainer not in RANKED and ", ".join(s.args),
        why="the {s.trainer} trainer takes none, {it} would do nothing",
        hint=f"Leave them out, or name the trainer.backend that they are for: {_RANK_NAMES}.",
    ),
    BackendLimit(
        key="pool.mode",
        breaks=lambda s: (
            s.mode == "fused"
            and s.trainer in RANKED
            and ((s.trainer, s.engine) not in FUSES or s.tp * s.pp * s.cp * s.dp > 1)
        ),
        why="fused is one process for trainer and engine, but {s.trainer} has processes of its own",
        hint="Leave it out (auto), or set it to resident. fsdp of one rank is fused with rollout.backend: "
        "transformers alone.",
    ),
    BackendLimit(
        key="lora.dora",
        breaks=lambda s: s.adapter and s.adapter.dora and s.trainer not in _WITH_DORA,
        why="the {s.trainer} trainer has no place for the magnitudes of DoRA",
        hint=f"Use trainer.backend: {' or '.join(_WITH_DORA)}, or leave lora.dora out.",
    ),
    BackendLimit(
        key="lora.dora",
        breaks=lambda s: s.adapter and s.adapter.dora and s.adapter.experts,
        why="DoRA is not computed on experts ({it[0]})",
        hint=f"Leave them as they are {_LEAVE_EXPERTS}, or leave lora.dora out.",
    ),
    BackendLimit(
        key="lora.dropout",
        breaks=lambda s: s.adapter and s.adapter.dora and s.adapter.dropout,
        why="{it} with lora.dora: PEFT then drops inputs of the base itself, too",
        hint="Set it to 0, or leave lora.dora out.",
    ),
    BackendLimit(
        key="lora.target_modules",
        breaks=_foreign_experts,
        why="the {s.trainer} trainer adapts no experts of {s.model.model_type}",
        hint=f"Leave them as they are {_LEAVE_EXPERTS}, or use trainer.backend: builtin.",
    ),
)
_FSDP = (
    BackendLimit(
        key="trainer.{it[0]}",
        breaks=_foreign_axis,
        why="fsdp cuts the base over all of its ranks, and sequences over those of trainer.cp",
        hint="Set it to 1 and use trainer.dp, or take trainer.backend: megatron.",
    ),
    BackendLimit(
        key="trainer.backend_args",
        breaks=lambda s: ", ".join(sorted({*s.args} - {ATTENTION})),
        why="fsdp has no {it}",
        hint=f"It takes {ATTENTION}: a name.",
    ),
    BackendLimit(
        key="trainer.backend_args",
        breaks=lambda s: not isinstance(name := s.args.get(ATTENTION), str | None) and repr(name),
        why=f"{ATTENTION} is {{it}}, no name",
        hint="Give one of transformers', as sdpa.",
    ),
    BackendLimit(
        key="trainer.backend_args",
        breaks=lambda s: s.cp > 1 and ATTENTION in s.args,
        why=f"{ATTENTION} does nothing with trainer.cp, whose ranks have an attention of their own",
        hint="Leave it out.",
    ),
    BackendLimit(
        key="trainer.cp",
        breaks=lambda s: s.model and s.model.kv_heads % s.cp,
        why="{s.cp} ranks cannot share {s.model.kv_heads} key-value heads",
        hint="It must divide num_key_value_heads; use trainer.dp for more ranks.",
    ),
)
_MEGATRON = (
    BackendLimit(
        key="trainer.{it[0]}",
        breaks=_foreign_axis,
        why="the megatron trainer cuts no sequence over ranks",
        hint="Set it to 1 and use trainer.tp, pp or dp, or take trainer.backend: fsdp.",
    ),
    BackendLimit(
        key="trainer.backend_args",
        breaks=lambda s: ", ".join(sorted(_OWN & s.args.keys())),
        why="{it} is for lorad to set",
        hint="Leave it out: it follows from the rest of the spec. For long sequences use "
        "trainer.backend: fsdp with trainer.cp.",
    ),
    BackendLimit(
        key="lora.rank",
        breaks=_fitting_ranks,
        why="{s.rank} cannot be cut over the {s.tp} tensor-parallel ranks of trainer.tp",
        hint="Use a rank of {it}, or another trainer.tp.",
    ),
    BackendLimit(
        key="trainer.ep",
        breaks=lambda s: s.tp * s.dp % s.ep and s.tp * s.dp,
        why="{s.ep} does not divide the {it} ranks of a pipeline stage (tp x dp)",
        hint="Experts are spread over ranks that are there already: lower it, or raise trainer.dp.",
    ),
    BackendLimit(
        key="trainer.pp",
        breaks=lambda s: s.has_critic and s.pp > 1,
        why="a critic reads the last hidden states, which only the last stage of a pipeline has",
        hint="Set it to 1 and raise trainer.tp, or choose an algorithm without a critic.",
    ),
    BackendLimit(
        key="model.quantize",
        breaks=lambda s: s.quantize,
        why="{it}, but {s.trainer} reads the checkpoint itself and would train on other weights than the "
        "engine samples from",
        hint="Use trainer.backend: builtin or fsdp, or leave it out.",
    ),
    BackendLimit(
        key="model.path",
        breaks=lambda s: s.model and s.model.model_type in UNBRIDGED,
        why="Megatron-Bridge has no {s.model.model_type}",
        hint="Use trainer.backend: fsdp, which loads what transformers loads.",
    ),
    BackendLimit(
        key="model.path",
        breaks=lambda s: s.model and s.model.model_type in COMPOSITE,
        why="the megatron trainer takes no model whose language model is one part of several, as "
        "{s.model.model_type} is",
        hint="Use trainer.backend: fsdp, which trains that part.",
    ),
    BackendLimit(
        key="model.path",
        breaks=lambda s: (
            s.model and s.model.model_type in NEEDS_TE and (s.device == "cpu" or s.dtype == "float32")
        ),
        why="Megatron computes {s.model.model_type} by Transformer Engine alone, which has no CPU and no "
        "attention in fp32",
        hint="Use trainer.backend: fsdp, or a GPU with model.dtype: bfloat16.",
    ),
    BackendLimit(
        key="trainer.tp",
        breaks=lambda s: s.model and s.model.kv_heads % s.tp,
        why="{s.tp} ranks cannot share {s.model.kv_heads} key-value heads",
        hint="It must divide num_key_value_heads; use trainer.dp for more ranks.",
    ),
    BackendLimit(
        key="trainer.pp",
        breaks=lambda s: s.model and s.model.layers % s.pp and not SPLITS & s.args.keys(),
        why="{s.pp} stages cannot share {s.model.layers} layers evenly",
        hint="It must divide num_hidden_layers, or trainer.backend_args say "
        "num_layers_in_first_pipeline_stage.",
    ),
    BackendLimit(
        key="trainer.ep",
        breaks=lambda s: s.model and s.ep > 1 and not s.model.experts,
        why="{s.ep} ranks for experts, but the model has none",
        hint="Leave it out, or set it to 1.",
    ),
    BackendLimit(
        key="trainer.ep",
        breaks=lambda s: s.model and s.model.expert_count % s.ep,
        why="{s.ep} ranks cannot share {s.model.expert_count} experts",
        hint="It must divide the experts of a layer.",
    ),
    BackendLimit(
        key="lora.target_modules",
        breaks=_half_fused,
        why="{it[0]}: with lora.type: lora, {it[1]} share one A",
        hint="Target all of them, or use lora.type: canonical_lora.",
    ),
    BackendLimit(
        key="trainer.backend_args",
        breaks=_grouped_experts,
        why="on a GPU Megatron computes all experts in one grouped product, where they get no adapters",
        hint="Set {{moe_grouped_gemm: false}}, which computes one expert after another and is slower, use "
        f"trainer.backend: fsdp, or leave the experts as they are {_LEAVE_EXPERTS}.",
    ),
    BackendLimit(
        key="lora.dropout",
        breaks=lambda s: s.adapter and s.tp > 1 and s.ep > 1 and s.adapter.experts and s.adapter.dropout,
        why="{it} on experts would differ between the copies of a token that the ranks of trainer.tp send to "
        "those of trainer.ep",
        hint=f"Set it to 0, set trainer.tp or ep to 1, or leave the experts as they are {_LEAVE_EXPERTS}.",
    ),
)
OF_TRAINERS = {"": _ANY, "fsdp": _FSDP, "megatron": _MEGATRON}
