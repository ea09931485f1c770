"""The experts of a model that transformers cuts by features: our grouped ops in the place of their forward.

Its styles cut the parameters of a module of experts (``packed_colwise`` and ``rowwise``, or for transposed matrices
``packed_rowwise`` and ``colwise``), and ``moe_tp_experts`` sums what the parts give.  :func:`experts_forward` computes
the same with :func:`tpkernels.copy_grouped_matmul` and :func:`tpkernels.grouped_matmul_all_reduce` from the very same
parameters.

:func:`hold_apart` gives gate and up parameters of their own, without which no snapshot could be written: each rank has
a piece of both in what transformers cut.

It assumes nothing of the class's name: :mod:`tpkernels.planning.modules.experts` compares the module's own forward with
a layout, on samples.  It refuses, with the reason, experts that compute something else, and parameters that are cut
otherwise than their layout asks for.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpkernels.nn.cut_experts import CutExperts, ExpertsLayout, arguments_of, experts_output, held_parts
from tpkernels.nn.gathering import pieces_of
from tpkernels.nn.parameters import local
from tpkernels.nn.retired import retires_parameters
from tpkernels.planning.modules.experts import KnownExperts, Refused, find_experts, takes

__all__ = ["ExpertsForward", "experts_forward", "hold_apart"]


def experts_forward(
    module: nn.Module, mesh: DeviceMesh, known: dict[Any, KnownExperts | Refused]
) -> ExpertsForward | str:
    """Our forward for ``module``, or why it cannot have one.  ``known``: of modules that are alike; filled here."""
    found, refused = find_experts(module, known)
    if "" not in found:
        return refused.get("", "it does not hold its experts in 3-dimensional parameters")
    layout = found[""].layout
    return _cut_otherwise(module, layout) or ExpertsForward(module, layout, mesh)


@retires_parameters
def hold_apart(model: nn.Module) -> nn.Module:
    """Let the experts that run our ops hold gate and up as parameters of their own, in place; returns the model.

    Raises:
        ValueError: a packed weight of something else, or of experts that FSDP2 has cut as well.
    """
    packed = [name for name, parameter in model.named_parameters() if pieces_of(parameter) is not None]
    modules = {name: module for name, module in model.named_modules()}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in packed):
        module, forward = modules[path], vars(modules[path]).get("forward")
        if not isinstance(forward, ExpertsForward) or forward.mesh != next(module.parameters()).device_mesh:
            raise ValueError(
                f"{path} has two layers in one weight, of which transformers gives each rank a piece of both: no "
                "snapshot can be written of it; load the model without register(), and call prepare()"
            )
        made = CutExperts.of_cut(module, forward.layout, forward.mesh)
        module.__class__, module.__dict__ = type(made), made.__dict__
        del module.forward
    return model


def _cut_otherwise(module: nn.Module, layout: ExpertsLayout) -> str | None:
    if layout.gate == "pairs":
        return "its gate and up stand in turns"
    if not layout.is_plain:
        return "experts of this kind are cut by plans of tpkernels alone"
    for name, parameter in module.named_parameters(recurse=False):
        bias, last = name.endswith("_bias"), name.removesuffix("_bias") == layout.last
        if bias and last:
            expected: tuple[int, int] | None = None
        else:
            dim = 1 if bias else 3 - layout.features if last else layout.features
            expected = dim, 2 if layout.gate == "halves" and not last else 1
        if _cut_of(parameter) != expected:
            return f"its {name} is cut as {getattr(parameter, 'placements', 'a whole')}, which is not by features"
    return None


def _cut_of(parameter: Tensor) -> tuple[int, int] | None:
    """The dimension that is cut, and in how many pieces each rank has of it; None for a whole."""
    if not isinstance(parameter, DTensor):
        return None
    (placement,) = parameter.placements
    if placement.is_replicate():
        return None
    return getattr(placement, "dim", -1) % parameter.dim(), getattr(placement, "split_factor", 1)


class ExpertsForward:
    """The ``forward`` of a module of experts that runs the grouped ops."""

    def __init__(self, module: nn.Module, layout: ExpertsLayout, mesh: DeviceMesh) -> None:
        self.module, self.layout, self.mesh = module, layout, mesh
        self.takes = takes(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        held: dict[str, Tensor | None] = {}
        for name, parameter in self.module.named_parameters(recurse=False):
            mine = cast(Tensor, local(parameter))
            held |= {part: tensor for part, tensor, _ in held_parts(self.layout, name, mine)}
        given = [_whole(one) for one in arguments_of(self.takes, args, kwargs)]
        return experts_output(self.module, self.layout, held, given, self.mesh)


def _whole(given: Any) -> Any:
    if not isinstance(given, DTensor):
        return given
    return given.redistribute(placements=[Replicate()]).to_local()
