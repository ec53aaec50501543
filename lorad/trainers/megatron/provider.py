"""Build Megatron's model, frozen and without adapters, from a Hugging Face directory and a spec's numbers."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from lorad.errors import SpecError
from lorad.limits.of_trainers import own_fields
from lorad.trainers.sharded.body import BodySettings

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_FUSION = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
    "attention_softmax_in_fp32": True,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
"""What Megatron's own layers cannot do without Transformer Engine or Apex, or do less exactly."""


@dataclass(frozen=True)
class Base:
    """Megatron's part of a base on this rank."""

    bridge: Any  # Bridge's `AutoBridge`, which knows the names
    model: nn.Module  # the bare `GPTModel`, one stage of it
    config: Any  # by the directory's `config.json`
    packed: bool  # whether attention takes packed sequences, or needs a mask


def open_bridge(settings: BodySettings) -> Any:
    """Return Bridge's `AutoBridge`. Raises SpecError without Bridge, and for a model unknown to it."""
    # it logs what it lacks, and every module of every mount
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise SpecError(
            f"Megatron-Bridge cannot be imported: {error}",
            key="trainer.backend",
            hint="config.yaml: backends: {megatron: {python: …}} must name an interpreter that has "
            "megatron-bridge, megatron-core and transformer-engine",
        ) from error
    with taken(settings.model):
        return AutoBridge.from_hf_pretrained(settings.model, torch_dtype=DTYPES[settings.dtype])


def build(settings: BodySettings, *, is_empty: bool = False) -> Base:
    """Build the model. An empty one is on the meta device, without weights.

    Raises SpecError for what lorad or Megatron does not take.
    """
    _check(settings)
    bridge = open_bridge(settings)
    dtype = DTYPES[settings.dtype]
    config = bridge.hf_pretrained.config
    with taken(settings.model):
        provider = bridge.to_megatron_provider(load_weights=not is_empty)
    from megatron.core.extensions.transformer_engine import HAVE_TE

    # Transformer Engine has no fused attention in fp32, so Megatron's own layers compute that
    packed = bool(HAVE_TE) and settings.device.startswith("cuda") and settings.dtype != "float32"
    own = own_fields(settings, dtype, pads=config.vocab_size % settings.tp > 0)
    if not packed:
        from megatron.bridge.models.gpt_provider import local_layer_spec

        own |= {"transformer_layer_spec": local_layer_spec, **_NO_FUSION}
    names = {field.name for field in fields(provider)}
    for name in settings.args:
        if name not in names:
            raise SpecError(
                f"{type(provider).__name__} has no field {name}",
                key="trainer.backend_args",
                hint="fields are those of Megatron's TransformerConfig and of Bridge's provider for this "
                "model",
            )
    for name, value in (own | settings.args).items():
        if name in names:
            setattr(provider, name, value)
    try:
        provider.finalize()
    except (ValueError, AssertionError, TypeError) as error:
        raise SpecError(
            f"Megatron does not take this trainer: {error}", hint="change trainer.backend_args, tp, pp or ep"
        ) from error
    place = torch.device("meta") if is_empty else contextlib.nullcontext()
    with taken(settings.model), place:
        return Base(bridge, _model(provider, settings), config, packed)


@contextlib.contextmanager
def taken(model: str) -> Iterator[None]:
    """Raise SpecError where Bridge or Megatron do not know a model, or cannot build or load it."""
    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        AssertionError,
        NotImplementedError,
        SafetensorError,
    ) as error:
        words = " ".join(str(error).partition("Currently supported")[0].split())[:300] or type(error).__name__
        raise SpecError(
            f"Megatron does not take {model}: {words}",
            key="model.path",
            hint="use trainer.backend: fsdp, or a model that Megatron-Bridge knows",
        ) from error


def _check(settings: BodySettings) -> None:
    """Check before anything is loaded that there are ranks for all stages."""
    world = dist.get_world_size()
    size = settings.tp * settings.pp
    if world % size:
        raise SpecError(
            f"tp x pp is {size}, not a part of the {world} ranks",
            key="trainer",
            hint="ranks are tp x pp x dp",
        )
    for name, number, kind in (
        ("ep", settings.ep, "expert-parallel rank"),
        ("pp", settings.pp, "pipeline stage"),
    ):
        if number > 1:
            log.warning(
                "trainer.%s: more than one %s was only ever run on tiny models, without a GPU", name, kind
            )


def _model(provider: Any, settings: BodySettings) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    if not parallel_state.model_parallel_is_initialized():
        # this tracker forks no generator: nothing but the adapter's dropout is random, and that is for lorad
        # to seed
        provider.initialize_model_parallel(seed=1, seed_kwargs={"inference_rng_tracker": True})
    on_cpu = settings.device == "cpu"
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=on_cpu, bf16=settings.dtype == "bfloat16", fp16=False
    )
    if len(chunks) > 1:
        raise SpecError(
            f"{len(chunks)} chunks of layers on one stage", key="trainer.backend_args", hint="leave it at one"
        )
    model: nn.Module = unwrap_model(chunks)[0]
    model.requires_grad_(False)
    return model.eval()


def check_rotary(reference: nn.Module, model: Any, config: Any) -> None:
    """Check that Megatron has the rotary frequencies of `reference`, transformers' model.

    Bridge passes on only some parameters. Raises SpecError where the frequencies differ: every score would be
    wrong, and nothing else would say so.
    """
    kind = type(reference.get_submodule("model.rotary_emb"))
    theirs: Any = kind(config=config)
    mine = model.rotary_pos_emb.get_freqs_non_repeated(2)[1].float().cpu()
    frequencies = theirs.inv_freq.float()
    scaled = float(getattr(theirs, "attention_scaling", 1.0)) != 1.0
    if scaled or mine.shape != frequencies.shape or not torch.allclose(mine, frequencies, rtol=1e-4, atol=0):
        raise SpecError(
            "Megatron computes other rotary positions than this config.json asks for",
            key="model.path",
            hint="use trainer.backend: builtin or fsdp for this model",
        )
