"""The experts of a mixture: every rank holds its slice of every expert, or some whole experts.

::

    h = act(x[token] @ gate[e]^T + b) * (x[token] @ up[e]^T + c)     a row per token and expert; e: the expert
    y = sum over a token's rows of routing weight * (h @ down[e]^T + d)

The router stays the model's own: it is replicated (:func:`~tpkernels.nn.replicate_parameters`), and the gradients of
its weights are complete, because those of the routing's weights are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpkernels import dispatch
from tpkernels.comm.groups import GroupLike
from tpkernels.nn.dealt_experts import DealtWeights, expert_mesh, run_dealt
from tpkernels.nn.parameters import cut_parameter, local, mesh_of, tp_mesh
from tpkernels.ops import (
    Routing,
    all_gather_grouped_matmul,
    copy_grouped_matmul,
    grouped_matmul_all_reduce,
    grouped_matmul_reduce_scatter,
)
from tpkernels.ops.contract import ACTIVATIONS, GATED
from tpkernels.ops.routing import as_routing

__all__ = ["LAYOUTS", "ParallelExperts"]

LAYOUTS = ("features", "experts")


class ParallelExperts(nn.Module):
    """The experts of a mixture; both grouped GEMMs hide their communication.

    ==============  ============  ==================================  ===========  ==================================
    parameter       whole shape   cut by "features"                   "experts"    "experts" on a mesh (ep, tp)
    ==============  ============  ==================================  ===========  ==================================
    ``gate``        ``[E, F, H]`` ``Shard(1)``; if gated only         ``Shard(0)`` ``Shard(0), Shard(1)``
    ``up``          ``[E, F, H]`` ``Shard(1)``                        ``Shard(0)`` ``Shard(0), Shard(1)``
    ``down``        ``[E, H, F]`` ``Shard(2)``                        ``Shard(0)`` ``Shard(0), Shard(2)``
    ``gate_bias``   ``[E, F]``    ``Shard(1)``, as ``up_bias``        ``Shard(0)`` ``Shard(0), Shard(1)``
    ``down_bias``   ``[E, H]``    ``Replicate()``; added once, after  ``Shard(0)`` ``Shard(0), Replicate()``
                                  the sum over the ranks
    ==============  ============  ==================================  ===========  ==================================

    With the layout "features" all tokens meet every rank's slice of their experts.  With "experts" a token goes to the
    ranks that have its experts, which send less where k is smaller than the number of ranks, and have GEMMs of whole
    experts; but ranks whose experts are chosen more often have more to do.  Both layouts take and give the same.

    Args:
        num_experts, d_model, d_ff: E, H and F; F need not divide by the number of ranks.
        activation: "swiglu", "geglu" or "clamped_swiglu", of gate and up; or None, "relu", "gelu", "gelu_tanh", "silu",
            of up alone.
        layout: "features" or "experts"; any number of experts, also fewer than ranks.  ``group`` may for "experts" be a
            mesh with an axis "ep", and "tp" behind it: experts are dealt out over the first, and their features cut
            over the second.
        sequence_parallel: x is this rank's tokens, and so is the routing; else both are the same on all ranks.
        save_gathered: keep the gathered tokens for the backward pass instead of gathering them again.  With the layout
            "experts" those that a rank has received are always kept.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Under one seed the initial weights are the same on any number of ranks: uniform, as those of ``nn.Linear``.

    Examples:
        >>> experts = tpk.nn.ParallelExperts(4, 8, 32, mesh["tp"])
        >>> weights, chosen = torch.randn(6, 4).softmax(-1).topk(2)
        >>> experts(torch.ones(2, 3, 8), tpk.Routing(chosen, weights)).shape
        torch.Size([2, 3, 8])
    """

    up: nn.Parameter
    down: nn.Parameter
    gate: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        group: GroupLike,
        *,
        activation: str | None = "swiglu",
        bias: bool = False,
        layout: str = "features",
        sequence_parallel: bool = False,
        save_gathered: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_experts", num_experts), ("d_model", d_model), ("d_ff", d_ff)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        _check(activation, implementation, layout)

        def made(*shape: int, fan_in: int) -> Tensor:
            limit = 1 / math.sqrt(fan_in)
            return torch.empty(shape, device=device, dtype=dtype).uniform_(-limit, limit)

        wide = (num_experts, d_ff, d_model)
        firsts = [made(*wide, fan_in=d_model) for _ in range(2 if activation in GATED else 1)]
        down = made(num_experts, d_model, d_ff, fan_in=d_ff)
        biases: list[Tensor | None] = [None] * len(firsts)
        down_bias = None
        if bias:
            biases = [made(num_experts, d_ff, fan_in=d_model) for _ in firsts]
            down_bias = made(num_experts, d_model, fan_in=d_ff)
        self._options(activation, layout, sequence_parallel, save_gathered, implementation)
        self._take(firsts, biases, down, down_bias, _mesh_for(layout, group, device), trained=True)

    @classmethod
    def from_parameters(
        cls,
        up: Tensor,
        down: Tensor,
        group: GroupLike,
        *,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        transposed: bool = False,
        interleaved: bool = False,
        activation: str | None = "swiglu",
        layout: str = "features",
        sequence_parallel: bool = False,
        save_gathered: bool = False,
        implementation: str = "auto",
    ) -> Self:
        """The experts of 3-dimensional parameters, as transformers has them; copies this rank's parts.

        Args:
            up: ``[E, F, H]``, or with a gated activation ``[E, 2 * F, H]``, the gate's rows before those of up; if
                ``interleaved``, rows of the gate and of up in turn.
            down: ``[E, H, F]``.
            up_bias, down_bias: ``[E, F]`` or ``[E, 2 * F]``, and ``[E, H]``.
            transposed: ``up`` is ``[E, H, F]`` or ``[E, H, 2 * F]``, and ``down`` ``[E, F, H]``.

        Examples:
            >>> up, down = torch.randn(4, 2 * 32, 8), torch.randn(4, 8, 32)
            >>> tpk.nn.ParallelExperts.from_parameters(up, down, mesh["tp"]).down.shape
            torch.Size([4, 8, 32])
        """
        _check(activation, implementation, layout)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._options(activation, layout, sequence_parallel, save_gathered, implementation)
        trained = up.requires_grad or down.requires_grad
        parts = [("up", up), ("down", down), ("up_bias", up_bias), ("down_bias", down_bias)]
        for name, tensor in parts:
            if isinstance(tensor, DTensor):
                raise ValueError(f"{name} is a DTensor already (placements {tensor.placements})")
            if tensor is not None and tensor.dim() != (2 if "bias" in name else 3):
                raise ValueError(f"{name} must have a dimension for the experts, got shape {tuple(tensor.shape)}")
        mesh = _mesh_for(layout, group, up.device)
        up, down = (one.detach().transpose(1, 2) if transposed else one.detach() for one in (up, down))
        count = 2 if activation in GATED else 1
        experts, d_model, d_ff = down.shape
        expected = {
            "up": (up, (experts, count * d_ff, d_model)), "up_bias": (up_bias, (experts, count * d_ff)),
            "down_bias": (down_bias, (experts, d_model)),
        }  # fmt: skip
        for name, (one, shape) in expected.items():
            if one is not None and tuple(one.shape) != shape:
                layout = "transposed " if transposed and name == "up" else ""
                raise ValueError(
                    f"{name} ({layout}{tuple(one.shape)}) must be {shape} for down of {tuple(down.shape)} and "
                    f"activation {activation!r}"
                )

        def parts_of(both: Tensor) -> list[Tensor]:
            return [both[:, i::count] for i in range(count)] if interleaved else [*both.chunk(count, 1)]

        biases = [None] * count if up_bias is None else parts_of(up_bias.detach())
        module._take(parts_of(up), biases, down, down_bias, mesh, trained)
        return module

    @classmethod
    def from_mlps(
        cls,
        mlps: Sequence[nn.Module],
        group: GroupLike,
        *,
        gate: str | None = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
        activation: str | None = "swiglu",
        layout: str = "features",
        sequence_parallel: bool = False,
        save_gathered: bool = False,
        implementation: str = "auto",
    ) -> Self:
        """The experts of a list of blocks with ``nn.Linear`` layers of these names (``gate``: None without one).

        Examples:
            >>> mlps = [nn.ModuleDict({"w1": nn.Linear(8, 32), "w2": nn.Linear(32, 8)}) for _ in range(4)]
            >>> experts = tpk.nn.ParallelExperts.from_mlps(
            ...     mlps, mesh["tp"], gate=None, up="w1", down="w2", activation="gelu"
            ... )
            >>> experts.up_bias.shape
            torch.Size([4, 32])
        """
        _check(activation, implementation, layout)
        if (gate is not None) != (activation in GATED):
            need = "needs the name of a" if gate is None else "has no"
            raise ValueError(f"activation {activation!r} {need} gate; with a gate: {list(GATED)}")
        if not mlps:
            raise ValueError("mlps must have at least 1 expert")

        def stacked(name: str) -> tuple[Tensor, Tensor | None]:
            linears = [mlp.get_submodule(name) for mlp in mlps]
            kinds = {type(linear).__name__ for linear in linears if not isinstance(linear, nn.Linear)}
            if kinds:
                raise ValueError(f"{name} must be an nn.Linear in every expert, got {', '.join(sorted(kinds))}")
            weights = [cast(Tensor, linear.weight) for linear in linears]
            found = [cast("Tensor | None", linear.bias) for linear in linears]
            biases = [bias.detach() for bias in found if bias is not None]
            if len({weight.shape for weight in weights}) > 1 or len(biases) not in (0, len(weights)):
                raise ValueError(f"{name} must have the same shape in every expert, and a bias in all or none")
            bias = torch.stack(biases) if biases else None
            return torch.stack([weight.detach() for weight in weights]), bias

        firsts = [stacked(name) for name in ((up,) if gate is None else (gate, up))]
        (last, last_bias), biases = stacked(down), [bias for _, bias in firsts if bias is not None]
        if biases and len(biases) < len(firsts):
            raise ValueError(f"{gate} and {up} must both have a bias, or none")
        trained = cast(nn.Linear, mlps[0].get_submodule(down)).weight.requires_grad
        return cls.from_parameters(
            torch.cat([weight for weight, _ in firsts], 1).requires_grad_(trained),
            last,
            group,
            up_bias=torch.cat(biases, 1) if biases else None,
            down_bias=last_bias,
            activation=activation,
            layout=layout,
            sequence_parallel=sequence_parallel,
            save_gathered=save_gathered,
            implementation=implementation,
        )

    def _options(
        self, activation: str | None, layout: str, sequence_parallel: bool, save_gathered: bool, implementation: str
    ) -> None:
        self.activation, self.layout, self.sequence_parallel = activation, layout, sequence_parallel
        self.save_gathered, self.implementation = save_gathered, implementation

    def _take(
        self,
        firsts: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        down: Tensor,
        down_bias: Tensor | None,
        mesh: DeviceMesh,
        trained: bool,
    ) -> None:
        names = ("gate", "up") if len(firsts) == 2 else ("up",)

        def cut(whole: Tensor | None, dim: int | None) -> nn.Parameter | None:
            """``dim``: that of the features that are cut."""
            if whole is None:
                return None
            features = Replicate() if dim is None else Shard(dim)
            placements = [features] if self.layout == "features" else [Shard(0), features][: mesh.ndim]
            return cut_parameter(whole, mesh, placements, requires_grad=trained, tp_axis=mesh.ndim - 1)

        self.register_parameter("gate", None)
        for name, weight in zip(names, firsts, strict=True):
            self.register_parameter(name, cut(weight, 1))
        self.register_parameter("down", cut(down, 2))
        self.register_parameter("gate_bias", None)
        self.register_parameter("up_bias", None)
        for name, bias in zip(names, biases, strict=True):
            self.register_parameter(f"{name}_bias", cut(bias, 1))
        self.register_parameter("down_bias", cut(down_bias, None))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the parameters live on; its groups are those that communicate."""
        return mesh_of(self.down)

    def forward(self, x: Tensor, routing: Routing, *, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """``x`` is ``[..., d_model]``, the routing that of its tokens, ``[..., k]`` or ``[tokens, k]``, in their order.

        ``shard_sizes``: every rank's number of tokens, needed with ``sequence_parallel`` where they are not all equal;
        on a mesh of two axes those of the first row of ranks come first.
        """
        if shard_sizes is not None and not self.sequence_parallel:
            raise ValueError(f"shard_sizes ({list(shard_sizes)}) cuts tokens: it needs sequence_parallel=True")
        mesh, tokens = self.mesh, x.reshape(-1, x.shape[-1])
        routing = as_routing(routing, mesh.get_group(0))
        routing = Routing(*(one.reshape(-1, one.shape[-1]) for one in routing))
        names = ("gate", "up") if self.gate is not None else ("up",)
        firsts = [cast(Tensor, local(getattr(self, name))) for name in names]
        biases = [local(getattr(self, f"{name}_bias")) for name in names]
        down, down_bias = cast(Tensor, local(self.down)), local(self.down_bias)
        if self.layout == "experts":
            return run_dealt(
                mesh, tokens, routing, DealtWeights(firsts, biases, down, down_bias), self.down.shape[0],
                activation=self.activation, own_tokens=self.sequence_parallel, shard_sizes=shard_sizes,
                implementation=self.implementation,
            ).view(x.shape)  # fmt: skip
        first = firsts if len(firsts) > 1 else firsts[0]
        if not self.sequence_parallel:
            h = copy_grouped_matmul(
                tokens, first, routing, mesh, bias=biases, activation=self.activation,
                implementation=self.implementation,
            )  # fmt: skip
            h = cast(Tensor, h)  # of one weight or a gated pair
            y = grouped_matmul_all_reduce(h, down, routing, mesh, bias=down_bias, implementation=self.implementation)
            return y.view(x.shape)
        h, whole = all_gather_grouped_matmul(
            tokens, first, routing, mesh, bias=biases, activation=self.activation, shard_sizes=shard_sizes,
            save_gathered=self.save_gathered, implementation=self.implementation,
        )  # fmt: skip
        h = cast(Tensor, h)
        y = grouped_matmul_reduce_scatter(
            h, down, whole, mesh, bias=down_bias, shard_sizes=shard_sizes, implementation=self.implementation
        )
        return y.view(x.shape)

    def extra_repr(self) -> str:
        experts, d_model, d_ff = self.down.shape
        text = f"num_experts={experts}, d_model={d_model}, d_ff={d_ff}, activation={self.activation!r}"
        text += (
            f", bias={self.down_bias is not None}, layout={self.layout!r}, sequence_parallel={self.sequence_parallel}"
        )
        return text + (f", implementation={self.implementation!r}" if self.implementation != "auto" else "")


def _check(activation: str | None, implementation: str, layout: str) -> None:
    known = [*sorted(ACTIVATIONS), *GATED]
    if activation is not None and activation not in known:
        raise ValueError(f"activation must be None or one of {known}, got {activation!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {list(LAYOUTS)}, got {layout!r}")
    dispatch.check_name("all_gather_grouped_matmul", implementation)


def _mesh_for(layout: str, group: GroupLike, device: torch.device | str | None) -> DeviceMesh:
    return tp_mesh(group, device) if layout == "features" else expert_mesh(group, device)
