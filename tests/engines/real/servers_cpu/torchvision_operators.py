"""Declares the operators of a torchvision whose own do not load, as those of a CUDA build."""

from typing import Any

_kept: list[Any] = []


def declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
