"""Whether Megatron turns positions into angles as the model was trained with: Bridge passes on only some
parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lorad.errors import SpecError


def check(reference: nn.Module, model: Any, config: Any) -> None:
    """reference: transformers' model, whose frequencies count.

    Raises: SpecError where Megatron's differ: every score would be wrong, and nothing else would say so.
    """
    kind = type(reference.get_submodule("model.rotary_emb"))
    theirs: Any = kind(config=config)
    mine = model.rotary_pos_emb.get_freqs_non_repeated(2)[1].float().cpu()
    wanted = theirs.inv_freq.float()
    scaled = float(getattr(theirs, "attention_scaling", 1.0)) != 1.0
    if scaled or mine.shape != wanted.shape or not torch.allclose(mine, wanted, rtol=1e-4, atol=0):
        raise SpecError(
            "Megatron computes other rotary positions than this config.json asks for",
            key="model.path",
            hint="use trainer.backend: builtin or fsdp for this model",
        )
