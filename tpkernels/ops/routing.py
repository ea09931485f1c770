"""Which experts each token goes to, and with which weights: what the grouped ops share beside their GEMMs.

Owns :class:`Routing`, the checks of it and of experts' weights, its way to the other ranks, and the order of the rows
(:class:`~tpkernels.gemm.grouped.TokenRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, GroupLike, resolve
from tpkernels.gemm import fp8
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops.checks import DTYPES, check_bias_dtype, check_same, dtype_names
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import accumulation_dtype
from tpkernels.ops.signatures import ALIKE, Compared, Signature
from tpkernels.partition import Layout

__all__ = [
    "Routing",
    "WholeRouting",
    "as_routing",
    "check_expert_values",
    "check_expert_weights",
    "check_routing",
    "compared_routing",
    "grouped_signature",
    "row_weights",
    "start_routing",
    "weighted_biases",
]

_Rows = TypeVar("_Rows", bound=TokenRows)


class Routing(NamedTuple):
    """The ``k`` experts of each of ``T`` tokens, and the weights of their results.

    ==============  ===========  ==========================================================
    field           shape        notes
    ==============  ===========  ==========================================================
    ``experts``     ``[T, k]``   int64, from 0 on; those of one token in any order
    ``weights``     ``[T, k]``   fp32, bf16, fp16 or fp64, whatever dtype the tokens have
    ==============  ===========  ==========================================================

    Both are what ``torch.topk`` of a router's scores returns, the other way round.

    Examples:
        >>> scores = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
        >>> weights, experts = scores.topk(2)
        >>> tpk.Routing(experts, weights).experts
        tensor([[1, 2],
                [0, 2]])
    """

    experts: Tensor
    weights: Tensor


def as_routing(routing: object, group: GroupLike | None) -> Routing:
    """A pair as the class; the ``group``, if any, is told of a refusal."""
    if isinstance(routing, tuple) and len(routing) == 2:
        return Routing(*routing)
    reason = f"routing must be a Routing(experts, weights), got {type(routing).__name__}"
    if group is not None:
        agreement.refuse(resolve(group), "a call", reason)
    raise ValueError(reason)


def check_routing(routing: Routing, num_tokens: int | None, device: torch.device) -> None:
    """``num_tokens``: rows that it must have, if that is known."""
    experts, weights = routing
    if experts.dim() != 2 or experts.shape[1] < 1:
        raise ValueError(f"routing.experts must be [tokens, k] with k of at least 1, got shape {tuple(experts.shape)}")
    if num_tokens is not None and experts.shape[0] != num_tokens:
        raise ValueError(f"routing must have a row per token ({num_tokens}), got experts of {tuple(experts.shape)}")
    if experts.dtype != torch.int64:
        raise ValueError(f"routing.experts must be torch.int64, got {experts.dtype}")
    if weights.shape != experts.shape:
        raise ValueError(
            f"routing.weights must have the shape of routing.experts {tuple(experts.shape)}, got {tuple(weights.shape)}"
        )
    if weights.dtype not in DTYPES:
        raise ValueError(f"routing.weights must be one of {dtype_names(DTYPES)}, got {weights.dtype}")
    for name, tensor in (("experts", experts), ("weights", weights)):
        if tensor.device != device:
            raise ValueError(f"routing.{name} must be on the device of the tokens ({device}), got {tensor.device}")


def check_expert_values(experts: Tensor, num_experts: int) -> None:
    """Kernels only: the numbers themselves."""
    if experts.numel() == 0:
        return
    low, high = (int(value) for value in experts.aminmax())
    if low < 0 or high >= num_experts:
        raise ValueError(f"routing.experts must be from 0 to {num_experts - 1}, got values from {low} to {high}")


def check_expert_weights(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    name_of_x: str = "x_shard",
    *,
    at_least: int = 1,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Weights ``[E, N_i, K]`` and biases ``[E, N_i]``, like ``x``, ``[rows, K]``, in dtype and device.

    ``at_least``: so many experts.  ``out_dtype``: of the biases, if x is fp8.
    """
    if not weights:
        raise ValueError("weights must be a tensor or a non-empty sequence of tensors")
    if len(biases) != len(weights):
        raise ValueError(f"bias must have one entry per weight ({len(weights)}), got {len(biases)}")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        name = f"weights[{i}]" if len(weights) > 1 else "weights"
        if weight.dim() != 3 or weight.shape[0] < at_least:
            least = f" of at least {at_least} expert" if at_least else ""
            raise ValueError(f"{name} must be [experts, N, K]{least}, got shape {tuple(weight.shape)}")
        if weight.shape[0] != weights[0].shape[0]:
            raise ValueError(f"{name} must have {weights[0].shape[0]} experts, as weights[0], got {weight.shape[0]}")
        if weight.shape[2] != x.shape[1]:
            raise ValueError(
                f"{name} must be [experts, N, {x.shape[1]}] to match {name_of_x}, got shape {tuple(weight.shape)}"
            )
        check_same(name, weight, x)
        if bias is not None:
            name = f"bias[{i}]" if len(weights) > 1 else "bias"
            if bias.shape != weight.shape[:2]:
                raise ValueError(f"{name} must have shape {tuple(weight.shape[:2])}, got {tuple(bias.shape)}")
            check_bias_dtype(name, bias, out_dtype)
            check_same(name, bias, x, dtype=out_dtype)


class WholeRouting(Generic[_Rows]):
    """The routing of all tokens, waited for when it is first asked for, and the rows that follow from its experts."""

    def __init__(self, wait: Callable[[], Routing], rows_of: Callable[[Tensor], _Rows]) -> None:
        self._wait, self._rows_of = wait, rows_of
        self._routing: Routing | None = None
        self._rows: _Rows | None = None

    def routing(self) -> Routing:
        if self._routing is None:
            self._routing = self._wait()
        return self._routing

    def rows(self) -> _Rows:
        if self._rows is None:
            self._rows = self._rows_of(self.routing().experts)
        return self._rows


def start_routing(
    group: Group,
    routing: Routing,
    layout: Layout,
    num_experts: int,
    dtype: torch.dtype,
    rows_of: Callable[[Tensor], _Rows],
) -> WholeRouting[_Rows]:
    """Send this rank's routing to all others.

    It travels in one message, as bytes that are called numbers of ``dtype``, that of the tokens: ranks that have agreed
    on the costs of a dtype need not measure those of another one.
    """
    experts, weights = routing
    if group.size == 1:
        return WholeRouting(lambda: Routing(experts.clone(), weights.clone()), rows_of)
    double = weights.dtype == torch.float64
    integer, wide = (torch.int64, torch.float64) if double else (torch.int32, torch.float32)
    top_k = experts.shape[1]
    packed = torch.cat([experts.to(integer), weights.detach().to(wide).contiguous().view(integer)], 1)
    detail = f"routing to {top_k} of {num_experts} experts with weights of {weights.dtype}"
    sent = packed.view(torch.uint8 if dtype == fp8.DTYPE else dtype)  # no backend of c10d knows fp8
    pending = start_gather(group, sent, layout, "auto", detail, dtype=dtype)

    def wait() -> Routing:
        whole = pending().view(integer)
        numbers, bits = (part.clone(memory_format=torch.contiguous_format) for part in whole.split(top_k, 1))
        return Routing(numbers.long(), bits.view(wide).to(weights.dtype))

    return WholeRouting(wait, rows_of)


def row_weights(routing: Routing, rows: TokenRows, dtype: torch.dtype) -> Tensor:
    """Weights in the order of the rows, in the accumulation dtype."""
    return rows.of_slots(routing.weights.detach().to(accumulation_dtype(dtype)))


def weighted_biases(routing: Routing, bias: Tensor | None) -> Tensor | None:
    """What biases ``[E, N]`` add to each token, ``[T, N]``, in the accumulation dtype: expert by expert."""
    if bias is None:
        return None
    wide = accumulation_dtype(bias.dtype)
    total = torch.zeros(routing.experts.shape[0], bias.shape[1], dtype=wide, device=bias.device)
    for experts, weights in zip(routing.experts.unbind(1), routing.weights.detach().to(wide).unbind(1), strict=True):
        total += bias.index_select(0, experts) * weights.unsqueeze(1)
    return total


def compared_routing(
    group: Group, signature: Signature, routing: Routing, scales: Sequence[Tensor] = ()
) -> Compared | None:
    """A call whose ranks must have been given the same routing, bit for bit: that is what its weights are summed by.

    ``scales``: what they must have the same of besides.
    """
    if group.size == 1:
        return None
    return Compared.of(signature, f"the routing and {ALIKE}" if scales else "the routing", [*routing, *scales])


def grouped_signature(
    op: str,
    x: Tensor,
    layout: Layout,
    columns: int,
    implementation: str,
    experts: tuple[int, int],
    *,
    detail: str = "",
    activation: str | None = None,
    bias: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Signature:
    """``experts``: how many there are, and how many a token has."""
    return Signature(
        op, x.dtype, x.device.type, layout, columns, implementation, detail, out_dtype, activation,
        experts=experts[0], top_k=experts[1], bias=bias,
    )  # fmt: skip
