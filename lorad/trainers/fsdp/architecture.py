"""Makes a Hugging Face causal LM without its weights, and looks how it is built."""

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft.utils.integrations import init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_flash_attn_2_available

from lorad.errors import SpecError
from lorad.limits.arguments import ATTENTION
from lorad.models.hf.opening import auto_class, in_a_line, without_towers
from lorad.trainers.sharded.rows import Rows, Sample, pack

log = logging.getLogger("lorad.fsdp")

_ROUTERS = {"gate", "router", "shared_expert_gate"}
_APART = {"full_attention", "sliding_attention"}
"""Kinds of layers that keep the sequences of a row apart, wherever in the row these begin."""
_LENGTH_SCALED = {"dynamic", "longrope"}
"""Kinds of RoPE whose frequencies follow from the longest sequence of a row."""
_FIRST = 24  # tokens of the first of two sequences in a row
_SECOND = 8
_SEED = 20260101
_ROUNDING = 0.05
"""What rounding may do to logits, by their norm: in bfloat16 it does less than a fifth of that."""
_Scores = Callable[[Tensor, Tensor], Tensor]  # from ids [1, N] and positions [1, N] to logits [N, vocab]


def attentions(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return the attentions to try, by transformers' names.

    Where sequences share a row, sdpa needs a mask of N * N; FlashAttention (GPU, half precision) needs none.
    """
    may_flash = device.type == "cuda" and dtype == torch.bfloat16 and is_flash_attn_2_available()
    flash = may_flash and not torch.are_deterministic_algorithms_enabled()
    return [*["flash_attention_2"] * flash, "sdpa", "eager"]


def empty_model(config: Any, dtype: torch.dtype, kinds: Sequence[str]) -> Any:
    """Make a frozen, tied model without towers for images and sound, whose parameters are on the meta device.

    Buffers are real, since no file holds all of them. It gets the first attention of `kinds` that it has.
    """
    for kind in kinds:
        try:
            with init_empty_weights(include_buffers=False):
                model = auto_class(config).from_config(
                    config, dtype=dtype, attn_implementation=kind, trust_remote_code=False
                )
            break
        except (ValueError, ImportError) as error:
            if kind == kinds[-1]:
                hint = (
                    f"it must be a causal language model; backend_args: {{{ATTENTION}: …}} chooses "
                    "another attention"
                )
                raise SpecError(f"{in_a_line(error)}", key="model.path", hint=hint) from error
            log.warning("%s is without %s attention", config.model_type, kind)
    without_towers(model).tie_weights()
    # what the architecture computes in fp32 all the same, as `from_pretrained` does
    if dtype != torch.float32:
        in_fp32 = "|".join(re.escape(name) for name in model._keep_in_fp32_modules_strict or ())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if in_fp32 and re.search(rf"(?:^|\.)(?:{in_fp32})(?:\.|$)", name):
                tensor.data = tensor.data.float()
    return model.eval().requires_grad_(False)


def decoder_of(model: Any) -> Any:
    """Return the module that computes the last hidden states; the class of Llama 4 names itself."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model else decoder


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers in order. Raises SpecError when no list is as long as the config says."""
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    hint = "use trainer.backend=builtin or another model"
    raise SpecError(
        f"no list of {count} decoder layers in {type(model).__name__}", key="model.path", hint=hint
    )


def linear_shapes(model: Any, layers: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the linears in the decoder's layers by logical name, and of an untied `lm_head`.

    Routers and experts are left out: their inputs depend on which tokens are routed there (see `experts`).
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        inside.add(id(head))
    shapes = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        is_routed = "experts" in parts or parts[-1] in _ROUTERS
        if isinstance(module, nn.Linear) and id(module) in inside and not is_routed:
            shapes[name] = (module.out_features, module.in_features)
    if not shapes:
        hint = "use a model whose layers are made of linears (transformers' Conv1D is none)"
        raise SpecError(
            f"{type(model).__name__} has no linear that an adapter could be put on",
            key="model.path",
            hint=hint,
        )
    return shapes


def takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def may_pack(model: Any) -> bool:
    """Return whether nothing in the config speaks against several sequences in a row."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    ropes = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return takes(model, "position_ids") and kinds <= _APART and not _LENGTH_SCALED & set(_words(ropes))


def _words(nested: object) -> list[str]:
    """Return every string among the values of nested mappings and lists."""
    if isinstance(nested, str):
        return [nested]
    inner = nested.values() if isinstance(nested, Mapping) else nested if isinstance(nested, Sequence) else ()
    return [word for value in inner for word in _words(value)]


@torch.no_grad()
def keeps_apart(scores: _Scores, vocab: int, device: torch.device) -> bool:
    """Compare a sequence behind another with the same alone. Collective where `scores` is.

    Their greatest difference must be less than a quarter of what seeing the other sequence makes: rounding
    makes far less than that, and seeing another sequence far more.
    """
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(vocab, (1, _FIRST + _SECOND), generator=generator).to(device)
    through = torch.arange(_FIRST + _SECOND, device=device)[None]
    restarted = torch.cat([through[:, :_FIRST], through[:, :_SECOND]], dim=1)
    alone = scores(ids[:, _FIRST:], through[:, :_SECOND]).float()
    packed = scores(ids, restarted)[_FIRST:].float()
    seeing = scores(ids, through)[_FIRST:].float()
    return bool((packed - alone).norm(dim=-1).max() <= (seeing - alone).norm(dim=-1).max() / 4)


def probe(vocab: int, tokens: int, device: torch.device) -> Rows:
    """Return a row of two sequences, the second of which has a token."""
    generator = torch.Generator().manual_seed(_SEED)
    whole = torch.randint(vocab, (tokens,), generator=generator).to(torch.int32).numpy()
    nothing = np.zeros(0, np.int64)
    return pack([Sample(0, whole, nothing, 0), Sample(1, whole[:2], nothing, 0)], device)


def computes_alike(logits: Tensor, expected: Tensor) -> bool:
    """Compare logits [tokens, vocab] up to rounding, which may give some tokens other experts."""
    difference = (logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return not difference.numel() or float(difference.median()) < _ROUNDING


@dataclass
class Recompute:
    """A switch for a model's layers, in evaluation mode too: a base's dropout acts in transformers' own."""

    on: bool = False

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Put the switch into layers before `fully_shard`, so that a layer's weights are gathered once."""

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        for layer in layers:
            switched = functools.partial(run, layer.forward)
            layer.forward = functools.update_wrapper(switched, layer.forward)
