"""A row layer that leaves its sum over the ranks to the addition and the norm that follow it.

::

    y      = row(x)             a PendingSum: nothing has been multiplied or sent yet
    sums   = y + residual       one op computes sums and norm(sums), which waits for the norm
    normed = norm(sums)         takes what waits

It owns :class:`PendingSum`, which stands for y, and :class:`FusedNorm`, the tie between one row and one norm.  The
model's code runs as it is.  Whatever it does to y other than one addition makes y an ordinary tensor first, with the
value and the gradient that it would have had.  So the proof that a row is followed by a norm
(:mod:`tpkernels.planning.entries.fused_norms`) is about speed: without it results are right, and a norm was computed in
vain.

All ranks make the same call for each y, whoever looks at it: y on its own is the sum with a residual of zeros, so that
a hook on one rank alone does not make ranks differ.  With sequence parallelism that holds for the forward pass: if one
rank alone looks (torch's FlopCounterMode does, for one), ranks sum the gradient of the norm's weight in different
places of the backward pass, which is a GroupMismatch.

Activation checkpointing keeps tensors of a region with hooks on what autograd saves.  Where such hooks are set, the sum
is fused only with a norm of the same block, and only if nothing between row and norm leaves the region; otherwise the
recomputation would save other tensors than the forward pass did, or what lies outside would keep what is inside.

Nothing is deferred under ``torch.compile``, ``torch.export``, tracing, autocast or functorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from tpkernels.comm.groups import group_name
from tpkernels.nn.parameters import local
from tpkernels.ops.gradients import of_linear
from tpkernels.ops.main_grad import sink_of
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.options import Scatter
from tpkernels.ops.transforms import is_transformed

__all__ = ["FusedNorm", "PendingSum", "RowCall", "fuse", "hand_on", "saving_hooks"]


LEAST_ROWS_ON_CPU = 256
"""Below it Python takes longer to keep the result of a norm than the fused op saves.

A Llama of 4 blocks of 512 features without gradients, fused over unfused: 1.2 with one row, 1.1 with 16 and 32 in fp32
and bf16, 0.99 to 1.05 with 64 and 128, 1.00 (fp32) and 0.97 (bf16) with 256; with gradients 0.95 and 0.89 with 256
(2 ranks on one host, medians in turns, 2026-11-23).
"""


class CutSequence(Protocol):
    """A residual that travels as a DTensor cut along dimension 1."""

    shape: tuple[int, ...]

    def wrap(self, part: Tensor) -> DTensor: ...

    def part(self, x: DTensor) -> Tensor: ...

    def is_flat(self, x: Tensor) -> bool: ...


@dataclass(eq=False)
class RowCall:
    """A call of a row that has not been made: its operands and options, and what was true when the model made it."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    mesh: DeviceMesh
    implementation: str
    scatter: tuple[int, Sequence[int] | None] | None
    """With sequence parallelism the dimension of the sequence, and each rank's length of it."""
    gradients: bool
    hooks: Any

    def run(self, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(normed, sums), of this rank's rows with sequence parallelism."""
        options: dict[str, Any] = {"residual": residual, "norm_weight": norm_weight, "eps": eps}
        options |= {"bias": self.bias, "implementation": self.implementation}
        if self.scatter is None:
            return cast(tuple[Tensor, Tensor], matmul_all_reduce(self.x, self.weight, self.mesh, **options))
        dim, sizes = self.scatter
        results = matmul_reduce_scatter(self.x, self.weight, self.mesh, scatter_dim=dim, shard_sizes=sizes, **options)
        return cast(tuple[Tensor, Tensor], results)


@dataclass
class _Waiting:
    """A result of the norm for ``sums``, until the norm is called with it or nobody has ``sums`` any more."""

    sums: weakref.ref[Tensor]
    version: tuple[int, ...]
    normed: Tensor
    gradients: bool
    hooks: Any


class FusedNorm:
    """What a row layer knows of the norm that follows it.

    ``same_block``: row and norm are inside one block, of which a checkpointed region is never a part.  ``always``:
    fuse also where it does not pay.
    """

    def __init__(self, norm: nn.Module, eps: float, *, same_block: bool, always: bool) -> None:
        self.norm, self.eps, self.same_block, self.always = norm, eps, same_block, always
        self.sequence: CutSequence | None = None
        """With sequence parallelism: how the residual is cut."""
        self.sums = 0
        """Sums that were fused so far."""
        self.taken = 0
        """Results that the norm took."""
        self._waiting: _Waiting | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_waiting": None}  # a copy of a model begins without anything that waits

    def applies(self, weight: Tensor, mesh: DeviceMesh, x: Tensor) -> bool:
        """Whether the row of ``weight`` may leave its product with ``x`` to the addition.

        The answer is the same on all ranks: it rests on the model's weights, on the rows of x, and on what traces or
        transforms the model's code.
        """
        if x.device.type == "cpu" and not self.always and x.numel() < LEAST_ROWS_ON_CPU * x.shape[-1]:
            return False
        if mesh.size() == 1 or is_transformed():
            return False
        own: Tensor | None = self.norm._parameters.get("weight")
        if not isinstance(own, DTensor) or own.device_mesh != mesh:  # at rest in FSDP2
            return False
        return own.dtype == weight.dtype == x.dtype and own.device == weight.device

    def pending(self, call: RowCall) -> Tensor:
        """What stands in for the product of ``call``."""
        before = call.x.shape[:-1] if self.sequence is None else self.sequence.shape[:2]
        shape = torch.Size((*before, call.weight.shape[0]))
        operands = call.x, call.weight, call.bias
        result: Tensor = _Deferred.apply(*operands, self, call, shape)  # type: ignore[no-untyped-call]
        return result

    def weight(self) -> Tensor:
        """The norm's, of this rank; with sequence parallelism the op sums its gradient, and nothing else may."""
        return cast(Tensor, local(self.norm._parameters["weight"]))

    def keep(self, sums: Tensor, normed: Tensor) -> None:
        """Let ``normed`` wait for the norm's call with ``sums``."""

        def drop(_: object) -> None:
            self._waiting = None

        self.sums += 1
        hooks = saving_hooks()
        self._waiting = _Waiting(weakref.ref(sums, drop), _version(sums), normed, torch.is_grad_enabled(), hooks)

    def hand_on(self, sums: Tensor, part: Tensor) -> None:
        """What waits for ``sums`` waits for ``part``, the local part of it, from now on."""
        waiting = self._waiting
        if waiting is not None and waiting.sums() is sums and waiting.version == _version(sums):
            waiting.sums, waiting.version = weakref.ref(part), _version(part)

    def take(self, sums: Tensor) -> Tensor | None:
        """The norm's result for ``sums``, if it waits, nobody has written to ``sums``, and autograd sees it alike."""
        waiting = self._waiting
        if waiting is None or waiting.sums() is not sums:
            return None
        self._waiting = None
        if waiting.version != _version(sums) or waiting.gradients != torch.is_grad_enabled():
            return None
        if not _same_hooks(waiting.hooks, saving_hooks()):
            return None
        self.taken += 1
        return waiting.normed if waiting.normed.shape == sums.shape else waiting.normed.view(sums.shape)


def fuse(row: nn.Module, norm: nn.Module, eps: float, *, same_block: bool, always: bool) -> FusedNorm:
    """Tie ``row``, a :class:`~tpkernels.nn.RowParallelLinear`, to the norm that follows it, in place."""
    tie = FusedNorm(norm, eps, same_block=same_block, always=always)
    row.followed_by = tie  # type: ignore[assignment]
    norm.__dict__.setdefault("_fused_after", []).append(tie)
    if not getattr(type(norm), "_takes_results", False):
        norm.__class__ = _taking(type(norm))  # type: ignore[arg-type]
    return tie


@lru_cache(maxsize=256)
def _taking(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a norm's class that takes a result that waits for it instead of computing it."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            for tie in cast("list[FusedNorm]", self._fused_after):
                normed = tie.take(args[0])
                if normed is not None:
                    return normed
        return cls.forward(self, *args, **kwargs)

    members = {"forward": forward, "_takes_results": True, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members | {"__qualname__": cls.__qualname__}))


def hand_on(norm: nn.Module, sums: Tensor, part: Tensor) -> None:
    """Before ``norm`` is called with ``part`` in place of ``sums``."""
    for tie in cast("Sequence[FusedNorm]", norm.__dict__.get("_fused_after", ())):
        tie.hand_on(sums, part)


class PendingSum(Tensor):
    """A row's result that has not been computed; shape, dtype, device and gradient are known.

    ``+`` with a tensor of its shape computes the sum and the norm of it.  Everything else computes the result itself.
    """

    tie: FusedNorm
    call: RowCall | None
    """None once the result has been computed."""
    token: object
    """What autograd has of it, as long as nobody has put a step of his own in between."""
    gradients: bool
    """Whether it was made with gradients enabled."""
    data_only: Tensor | None
    result: Tensor | None

    @staticmethod
    def make(tie: FusedNorm, call: RowCall, shape: torch.Size, token: object) -> PendingSum:
        dtype, device = call.x.dtype, call.x.device
        pending = torch.Tensor._make_wrapper_subclass(PendingSum, shape, dtype=dtype, device=device)
        pending.tie, pending.call, pending.token = tie, call, token
        pending.gradients, pending.data_only, pending.result = call.gradients, None, None
        return pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SUMS and len(args) == 2 and not kwargs:
            sums = _fused(*args)
            if sums is not None:
                return sums
        if func is F.dropout and isinstance(args[0], PendingSum) and _drops_nothing(*args, **kwargs):
            return args[0]
        args, kwargs = tree_map_only(PendingSum, _computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Below autograd: what reaches this has not passed ``__torch_function__``."""
        args, kwargs = tree_map_only(PendingSum, _data, (args, kwargs or {}))
        return func(*args, **kwargs)


_FACTS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "layout", "is_cuda", "is_leaf")
) | {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.is_complex, Tensor.numel}
"""What can be asked of a tensor without its numbers."""
_SUMS = frozenset([Tensor.add, Tensor.__add__, torch.add])


def _drops_nothing(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not inplace and (p == 0 or not training)


def _fused(a: Any, b: Any) -> Tensor | None:
    """``a + b`` with the norm of it; None where the pending one of them must be computed first."""
    pending, residual = (a, b) if isinstance(a, PendingSum) else (b, a)
    call, tie = pending.call, pending.tie
    if call is None or not _intact(pending) or not _fits(residual, pending, tie.sequence):
        return None
    hooks = saving_hooks()
    if call.gradients != torch.is_grad_enabled() or not _same_hooks(call.hooks, hooks):
        return None
    if hooks is not None and not tie.same_block:
        return None
    if tie.sequence is None:
        normed, sums = call.run(residual, tie.weight(), tie.eps)
    else:
        normed, local_sums = call.run(tie.sequence.part(residual), tie.weight(), tie.eps)
        sums = tie.sequence.wrap(local_sums)
    tie.keep(sums, normed)
    return sums


def _intact(pending: PendingSum) -> bool:
    """Whether its gradient still goes straight to the row."""
    return pending.grad_fn is None or getattr(pending.grad_fn, "token", None) is pending.token


def _fits(residual: Any, pending: PendingSum, sequence: CutSequence | None) -> bool:
    if not isinstance(residual, Tensor) or residual.shape != pending.shape:
        return False
    if residual.dtype != pending.dtype or residual.device != pending.device:
        return False
    if sequence is None:
        return type(residual) in (Tensor, nn.Parameter)
    return isinstance(residual, DTensor) and residual.placements == (Shard(1),) and not sequence.is_flat(residual)


def _computed(pending: PendingSum) -> Tensor:
    """The result as an ordinary tensor, whose gradient goes through ``pending``'s."""
    if pending.result is None:
        # The backward pass of a region may ask for it, where gradients are off: it is what it was made as.
        with torch.set_grad_enabled(pending.gradients or torch.is_grad_enabled()):
            pending.result = _Computed.apply(pending)  # type: ignore[no-untyped-call]
    return pending.result


def _data(pending: PendingSum) -> Tensor:
    """The numbers alone."""
    if pending.data_only is None:
        call, tie = pending.call, pending.tie
        assert call is not None
        rows = list(pending.shape) if tie.sequence is None else [*call.x.shape[:-1], pending.shape[-1]]
        if call.scatter is not None:
            dim, sizes = call.scatter
            assert sizes is not None
            rows[dim] = sizes[call.mesh.get_local_rank()]
        with torch.no_grad():
            _, y = call.run(call.x.new_zeros(rows), tie.weight(), tie.eps)
            pending.data_only = y if tie.sequence is None else tie.sequence.wrap(y)
        pending.call = None
    return pending.data_only


class _Deferred(torch.autograd.Function):
    """The row's step in autograd's graph, with the gradients of the row's op."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tie: FusedNorm, call: RowCall, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sinks, ctx.token, ctx.scatter = [sink_of(weight)], object(), None
        if call.scatter is not None:
            dim, sizes = call.scatter
            every = None if sizes is None else list(sizes)
            ctx.scatter = Scatter(group_name(call.mesh), dim, every, call.implementation)
        return PendingSum.make(tie, call, shape, ctx.token)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        if ctx.scatter is None:
            return *of_linear(ctx, "linear_backward", dy, x, weight), None, None, None
        part = cast(DTensor, dy).redistribute(placements=[Shard(1)]).to_local()
        return *of_linear(ctx, "matmul_reduce_scatter_backward", part, x, weight, ctx.scatter), None, None, None


class _Computed(torch.autograd.Function):
    """From a pending result to the ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, pending: PendingSum) -> Tensor:
        return _data(pending)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _version(x: Tensor) -> tuple[int, ...]:
    """Changes with each write; code writes to a DTensor, of which its local tensor hears nothing."""
    every = (x, x._local_tensor) if isinstance(x, DTensor) else (x,)
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in every)


def saving_hooks() -> Any:
    """The innermost hooks on tensors that autograd saves, those of a checkpointed region for example."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _same_hooks(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return all(mine is its for mine, its in zip(one, other, strict=True))
