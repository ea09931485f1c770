"""Layers with a GEMM that a plan leaves whole, each rank doing all of their work: named, or refused.

Trainers' integrations call it for plans that they make themselves; what a user's own plan leaves whole is the user's.
"""

from __future__ import annotations

import re
import warnings

import torch.distributed as dist
from torch import nn

from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.modules.experts import matrices_of_experts
from tpkernels.planning.modules.layers import layer_of
from tpkernels.planning.styles import Replicate

__all__ = ["name_whole_layers"]


def name_whole_layers(plan: ShardingPlan, model: nn.Module, *, strict: bool) -> None:
    """Say in one line for each kind of layer why it stays whole, by rank 0; before ``model`` is cut by ``plan``.

    Layers that differ in a number only (``layers.0``, ``layers.1``) are one.  Tables, norms and layers that PEFT keeps
    whole beside a cut one are not told.

    Raises:
        ValueError: with ``strict``, there is one.
    """
    said: dict[str, str] = {}
    for entry in plan.entries if plan.world_size > 1 else ():
        style = entry.style
        if isinstance(style, Replicate) and not style.distributed and _has_gemm(model.get_submodule(entry.path)):
            said.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", entry.path), entry.reason)
    for pattern, why in said.items():
        message = f"{pattern} does not run an op of tpkernels, each rank does all of its work: {why}"
        if strict:
            raise ValueError(message)
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(message, stacklevel=3)


def _has_gemm(module: nn.Module) -> bool:
    layer = layer_of(module)
    if isinstance(module, nn.Linear) or (layer is not None and layer.kind == "conv1d"):
        return True
    return bool(matrices_of_experts(module)) and not isinstance(module, nn.modules.conv._ConvNd)
