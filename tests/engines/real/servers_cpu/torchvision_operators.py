"""The operators of a torchvision that is a CUDA build, and so has none here: declared, so that it imports."""

from typing import Any

_kept: list[Any] = []


def declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
