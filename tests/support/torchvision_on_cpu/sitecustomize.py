"""Lets torchvision's build for CUDA be imported beside a torch for CPUs, for what is pure Python.

Its compiled part cannot be loaded there, and without the names of two operators its import fails.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
