"""Norms over features that are cut over the ranks: of queries or keys over all heads at once (OLMo 2, 3), or of what
goes into a row layer.

RMS norm::

    s   = sum over ranks of sum(x_r ** 2)          one number per row, [..., 1]: an all-reduce forward and one backward
    y_r = x_r / sqrt(s / features + epsilon) * weight_r

Or, with a gate, of ``x_r * silu(gate_r)`` ("before" the norm, as in Mamba 2), or ``y_r * silu(gate_r)`` ("after" it).

Layer norm (the feed-forward block of Kosmos-2.5, EVA-02)::

    m_r, v_r = mean(x_r), variance(x_r)            two numbers per row: an all-gather, and a reduce-scatter backward
    m   = mean over ranks of m_r                   all ranks have as many features
    v   = mean over ranks of v_r + (m_r - m) ** 2
    y_r = (x_r - m) / sqrt(v + epsilon) * weight_r + bias_r

With ``channels_first`` (RF-DETR) rows are the places of images, of ``x_r`` ``[N, features_r, ...]``.

Variances are joined as Chan, Golub and LeVeque do (1979), because the difference of the mean of squares and the square
of the mean would cancel.

Global response norm (ConvNeXt V2), of images ``[N, H, W, features]``::

    g_r = |x_r| over all places of an image        [N, 1, 1, features_r]
    m   = sum over ranks of sum(g_r) / features    one number per image: an all-reduce forward and one backward
    y_r = x_r * g_r / (m + epsilon) * weight_r + bias_r + x_r

In fp32 (fp64 for fp64), rounded once.  Weight and bias are DTensors, cut in their last dimension; their gradients are
complete on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parameters import local, mesh_of, shard_parameter, tp_mesh
from tpkernels.ops import all_gather, all_reduce, copy_to_group
from tpkernels.partition import chunk_sizes

__all__ = [
    "GATES",
    "PartLayerNorm",
    "PartRMSNorm",
    "PartResponseNorm",
    "layer_norm",
    "part_norm",
    "response_norm",
    "rms_norm",
]

GATES = ("", "before", "after")


def rms_norm(
    weight: Tensor,
    x: Tensor,
    gate_by: Tensor | None = None,
    *,
    epsilon: float,
    gate: str = "",
    summed: Callable[[Tensor], Tensor] = lambda squares: squares,
    features: int = 0,
) -> Tensor:
    """The equation above in the dtype of what is given; ``summed`` is given each row's sum of squares."""
    if gate == "before":
        assert gate_by is not None
        x = x * F.silu(gate_by)
    squares = summed(x.square().sum(-1, keepdim=True))
    y = x * torch.rsqrt(squares / (features or x.shape[-1]) + epsilon) * weight
    if gate == "after":
        assert gate_by is not None
        y = y * F.silu(gate_by)
    return y


def layer_norm(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    *,
    epsilon: float,
    dim: int = -1,
    gathered: Callable[[Tensor], Tensor] = lambda moments: moments,
) -> Tensor:
    """The equation above in the dtype of what is given, whose features are dimension ``dim``; ``gathered`` makes
    ``[ranks, ..., 2]`` of this rank's mean and variance of each row, ``[1, ..., 2]``."""
    x = x.movedim(dim, -1)
    variance, mean = torch.var_mean(x, -1, correction=0)
    means, variances = gathered(torch.stack((mean, variance), -1).unsqueeze(0)).unbind(-1)
    mean = means.mean(0)
    variance = (variances + (means - mean).square()).mean(0)
    y = (x - mean.unsqueeze(-1)) * torch.rsqrt(variance + epsilon).unsqueeze(-1) * weight
    return (y if bias is None else y + bias).movedim(-1, dim)


def response_norm(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    *,
    epsilon: float,
    summed: Callable[[Tensor], Tensor] = lambda sizes: sizes,
    features: int = 0,
) -> Tensor:
    """The equation above in the dtype of what is given; ``summed`` is given each image's sum of norms."""
    sizes = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim() - 1)), keepdim=True)
    mean = summed(sizes.sum(-1, keepdim=True)) / (features or x.shape[-1])
    y: Tensor = weight * (x * (sizes / (mean + epsilon))) + x
    return y if bias is None else y + bias


def part_norm(
    norm: nn.Module,
    group: GroupLike,
    *,
    epsilon: float,
    gate: str = "",
    centred: bool = False,
    response: bool = False,
    channels_first: bool = False,
) -> nn.Module:
    """The one of these that ``norm`` computes: a layer norm if ``centred``, of channels if ``channels_first``; a global
    response norm if ``response``."""
    if response:
        return PartResponseNorm.from_norm(norm, group, epsilon=epsilon)
    if centred:
        return PartLayerNorm.from_norm(norm, group, epsilon=epsilon, channels_first=channels_first)
    return PartRMSNorm.from_norm(norm, group, epsilon=epsilon, gate=gate)


def _check(weight: Tensor, mesh: DeviceMesh, epsilon: float) -> None:
    if 0 in chunk_sizes(weight.shape[-1], mesh.size()):
        raise ValueError(f"{weight.shape[-1]} features leave some of {mesh.size()} ranks without any")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")


def _keep_numbers(module: nn.Module, norm: nn.Module) -> None:
    """Which code around it may read (variance_epsilon, in Mamba 2)."""
    numbers = {key: value for key, value in vars(norm).items() if isinstance(value, int | float | str)}
    vars(module).update(numbers | vars(module))


class PartRMSNorm(nn.Module):
    """x, y and the gate, if it takes one, ``[..., features_r]``: this rank's part of the last dimension, cut as
    ``torch.chunk`` cuts.

    Examples:
        >>> norm = tpk.nn.PartRMSNorm.from_norm(nn.RMSNorm(8), mesh["tp"], epsilon=1e-6)
        >>> norm(torch.ones(3, 4)).shape  # half of 8 features
        torch.Size([3, 4])
    """

    weight: nn.Parameter
    features: int
    epsilon: float
    gate: str
    _tpk_sliced = ("weight",)

    def __init__(self) -> None:
        raise TypeError("PartRMSNorm is made by from_norm")

    @classmethod
    def from_norm(cls, norm: nn.Module, group: GroupLike, *, epsilon: float, gate: str = "") -> Self:
        """The norm with the weight of ``norm``; ranks whose weights differ take the first one's, or raise.

        ``gate``: "before" or "after", where the SiLU of a second argument is multiplied; "" without one.

        Raises:
            ValueError: it has other parameters than a vector ``weight``, or fewer features than there are ranks; an
                unknown ``gate``.
        """
        mesh, own = tp_mesh(group, norm), dict(norm.named_parameters())
        if list(own) != ["weight"] or own["weight"].dim() != 1:
            raise ValueError(f"{type(norm).__name__} must have one parameter, a vector named weight, got {list(own)}")
        weight = own["weight"]
        _check(weight, mesh, epsilon)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        if gate not in GATES:
            raise ValueError(f"gate must be one of {GATES}, got {gate!r}")
        module.features, module.epsilon, module.gate = weight.shape[0], epsilon, gate
        module.weight = shard_parameter(weight, mesh, 0, requires_grad=weight.requires_grad)
        _keep_numbers(module, norm)
        return module.train(norm.training)

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on."""
        return mesh_of(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        mesh, weight = self.mesh, cast(Tensor, local(self.weight))
        if (gate is None) == bool(self.gate) or (gate is not None and gate.shape != x.shape):
            wanted = f"a gate of shape {list(x.shape)}" if self.gate else "no gate"
            raise ValueError(f"PartRMSNorm takes {wanted} here, got {None if gate is None else list(gate.shape)}")
        if x.shape[-1] != weight.shape[0]:
            raise ValueError(f"PartRMSNorm takes {weight.shape[0]} of {self.features} features here, got {x.shape[-1]}")
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        gates = [] if gate is None else [gate.to(dtype)]

        def summed(squares: Tensor) -> Tensor:
            return copy_to_group(all_reduce(squares, mesh), mesh) if mesh.size() > 1 else squares

        y = rms_norm(
            weight.to(dtype), x.to(dtype), *gates, epsilon=self.epsilon, gate=self.gate, summed=summed,
            features=self.features,
        )  # fmt: skip
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}, epsilon={self.epsilon}" + (f", gate={self.gate!r}" if self.gate else "")


class PartLayerNorm(nn.Module):
    """x and y ``[..., features_r]``: this rank's part of the last dimension, which divides over the ranks; or with
    ``channels_first`` ``[N, features_r, ...]``, its part of dimension 1.

    Examples:
        >>> norm = tpk.nn.PartLayerNorm.from_norm(nn.LayerNorm(8), mesh["tp"], epsilon=1e-5)
        >>> norm(torch.ones(3, 4)).shape  # half of 8 features
        torch.Size([3, 4])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    features: int
    epsilon: float
    channels_first: bool
    _tpk_sliced = ("weight", "bias")

    def __init__(self) -> None:
        raise TypeError("PartLayerNorm is made by from_norm")

    @classmethod
    def from_norm(cls, norm: nn.Module, group: GroupLike, *, epsilon: float, channels_first: bool = False) -> Self:
        """The norm with the weight, and the bias if there is one, of ``norm``; ranks whose weights differ take the
        first one's, or raise.

        Raises:
            ValueError: it has other parameters than vectors ``weight`` and ``bias``, or features that do not divide
                over the ranks.
        """
        mesh, own = tp_mesh(group, norm), dict(norm.named_parameters())
        shapes = {key: tuple(one.shape) for key, one in own.items()}
        if list(own) not in (["weight"], ["weight", "bias"]) or own["weight"].dim() != 1 or len({*shapes.values()}) > 1:
            raise ValueError(f"{type(norm).__name__} must have vectors weight and bias, or weight alone, got {shapes}")
        _check(own["weight"], mesh, epsilon)
        if (features := own["weight"].shape[0]) % mesh.size():
            raise ValueError(f"{features} features of a layer norm do not divide over {mesh.size()} ranks")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.features, module.epsilon, module.channels_first = features, epsilon, channels_first
        for key in ("weight", "bias"):
            held = own.get(key)
            kept = None if held is None else shard_parameter(held, mesh, 0, requires_grad=held.requires_grad)
            module.register_parameter(key, kept)
        _keep_numbers(module, norm)
        return module.train(norm.training)

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on."""
        return mesh_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        mesh, weight = self.mesh, cast(Tensor, local(self.weight))
        dim = 1 if self.channels_first else -1
        if x.dim() <= max(dim, 0) or x.shape[dim] != weight.shape[0]:
            raise ValueError(
                f"PartLayerNorm takes {weight.shape[0]} of {self.features} features in dimension {dim} here, got "
                f"{list(x.shape)}"
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = layer_norm(
            weight.to(dtype), None if self.bias is None else cast(Tensor, local(self.bias)).to(dtype), x.to(dtype),
            epsilon=self.epsilon, dim=dim, gathered=lambda moments: all_gather(moments, mesh),
        )  # fmt: skip
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        first = ", channels_first=True" if self.channels_first else ""
        return f"features={self.features}, epsilon={self.epsilon}, bias={self.bias is not None}{first}"


class PartResponseNorm(nn.Module):
    """x and y ``[N, H, W, features_r]``: this rank's part of the last dimension, cut as ``torch.chunk`` cuts.

    Examples:
        >>> parameters = {"weight": torch.ones(1, 1, 1, 8), "bias": torch.zeros(1, 1, 1, 8)}
        >>> norm = tpk.nn.PartResponseNorm.from_norm(nn.ParameterDict(parameters), mesh["tp"], epsilon=1e-6)
        >>> norm(torch.ones(2, 3, 3, 4)).shape  # half of 8 features
        torch.Size([2, 3, 3, 4])
    """

    weight: nn.Parameter
    bias: nn.Parameter
    features: int
    epsilon: float
    _tpk_sliced = ("weight", "bias")

    def __init__(self) -> None:
        raise TypeError("PartResponseNorm is made by from_norm")

    @classmethod
    def from_norm(cls, norm: nn.Module, group: GroupLike, *, epsilon: float) -> Self:
        """The norm with the weight and the bias of ``norm``; ranks whose weights differ take the first one's, or raise.

        Raises:
            ValueError: it has other parameters than ``weight`` and ``bias`` of shape ``[1, 1, 1, features]``, or fewer
                features than there are ranks.
        """
        mesh, own = tp_mesh(group, norm), dict(norm.named_parameters())
        shapes = {key: tuple(one.shape) for key, one in own.items()}
        sizes = {shape[-1:] for shape in shapes.values() if len(shape) == 4 and shape[:-1] == (1, 1, 1)}
        if sorted(own) != ["bias", "weight"] or len({*shapes.values()}) > 1 or len(sizes) != 1:
            raise ValueError(f"{type(norm).__name__} must have weight and bias of [1, 1, 1, features], got {shapes}")
        _check(own["weight"], mesh, epsilon)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.features, module.epsilon = own["weight"].shape[-1], epsilon
        for key, held in own.items():
            module.register_parameter(key, shard_parameter(held, mesh, 3, requires_grad=held.requires_grad))
        _keep_numbers(module, norm)
        return module.train(norm.training)

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on."""
        return mesh_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        mesh, weight, bias = self.mesh, cast(Tensor, local(self.weight)), cast(Tensor, local(self.bias))
        if x.dim() != 4 or x.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"PartResponseNorm takes [N, H, W, {weight.shape[-1]}], of {self.features} features, here, got "
                f"{list(x.shape)}"
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

        def summed(sizes: Tensor) -> Tensor:
            return copy_to_group(all_reduce(sizes, mesh), mesh) if mesh.size() > 1 else sizes

        y = response_norm(
            weight.to(dtype), bias.to(dtype), x.to(dtype), epsilon=self.epsilon, summed=summed, features=self.features
        )
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}, epsilon={self.epsilon}"
