"""Rotary position embedding (RoFormer, arXiv 2104.09864) as tables, scaled as `lorad.models.rope_parameters`
says.

Everything is fp32 and in transformers' order of operations: the frequencies are the same to the last bit.
"""

import math

import torch

from lorad.models.config import ModelConfig
from lorad.models.rope_parameters import RopeParameters


def rope_tables(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each [max positions, rotated], the first half of sin negated; computed in fp32,
    then cast. What is rotated is head_dim, or a part of it.
    """
    rotated = int(config.head_dim * config.rope.partial_rotary_factor)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(config.rope, rotated))
    cos = angles.cos() * config.rope.attention_factor
    sin = angles.sin() * config.rope.attention_factor
    return (
        torch.cat([cos, cos], -1).to(device=device, dtype=dtype),
        torch.cat([-sin, sin], -1).to(device=device, dtype=dtype),
    )


def frequencies(rope: RopeParameters, dim: int) -> torch.Tensor:
    """Return the radians per position, fp32 [dim / 2], highest first."""
    powers = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.rope_type == "linear":
        return 1.0 / powers / rope.factor
    # arXiv 2407.21783: long waves are stretched, short ones kept, others blended
    if rope.rope_type == "llama3":
        plain = 1.0 / powers
        trained = rope.original_max_position_embeddings
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        wavelength = 2 * math.pi / plain
        unstretched = (trained / wavelength - low) / (high - low)
        blended = (1 - unstretched) * plain / rope.factor + unstretched * plain
        inner = torch.where(wavelength < trained / high, plain, blended)
        return torch.where(wavelength > trained / low, plain / rope.factor, inner)
    if rope.rope_type != "yarn":
        return 1.0 / powers

    # arXiv 2309.00071: a ramp from kept to stretched between the dimensions that turn beta_fast and beta_slow
    # times within the trained length
    def dimension(turns: float) -> float:
        turned = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(turned) / (2 * math.log(rope.rope_theta))

    first = dimension(rope.beta_fast)
    last = dimension(rope.beta_slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - stretched
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
