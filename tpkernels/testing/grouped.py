"""Cases of the grouped ops: one call in terms of the whole tensors, its operands on every rank, the call, the judge.

What must come out is in `grouped_expected.py`, within the elementwise fp64 bound; integers are judged bit for bit by
whoever compares two calls. Every rank can make the operands of all ranks by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.partition import offsets
from tpkernels.testing import grouped_expected as expected
from tpkernels.testing.fp8_operands import Fp8, fp8_of
from tpkernels.testing.numeric import GATED, Bounded, assert_bitwise_equal
from tpkernels.testing.payload import integer_payload, payload

__all__ = [
    "COPY",
    "GATHER",
    "GROUPED",
    "REDUCE",
    "SCATTER",
    "GroupedCase",
    "GroupedOperands",
    "call",
    "expected_gradients",
    "expected_value",
    "judge",
    "operands",
    "upstream",
]

GATHER, SCATTER, REDUCE, COPY = GROUPED = (
    "all_gather_grouped_matmul",
    "grouped_matmul_reduce_scatter",
    "grouped_matmul_all_reduce",
    "copy_grouped_matmul",
)


@dataclass(frozen=True)
class GroupedCase:
    """One call of a grouped op. `sizes`: tokens of every rank; `shape`: (N, K) of each expert's weight on rank 0.

    own: rank r has r more of the features that are cut (N of a gather, K of a reduction). load: "mixed", "one" (all
    tokens have expert 1 first) or "few" (the last expert has none). integers: every order of summation gives the same
    bits. call: another one gives other values. fp8: what x and the weights have scales per (see `quantize_fp8`), where
    they are fp8 and `dtype` is the result's; "mixed", of x: ranks in turn. Such a call is forward only.
    """

    op: str
    sizes: tuple[int, ...]
    shape: tuple[int, int] = (6, 8)
    num_experts: int = 4
    top_k: int = 2
    dtype: torch.dtype = torch.float32
    routing_dtype: torch.dtype = torch.float32
    bias: bool = False
    activation: str | None = None
    load: str = "mixed"
    own: bool = False
    strided: bool = False
    integers: bool = False
    return_gathered: bool = False
    save_gathered: bool = False
    implementation: str = "chunked"
    call: int = 0
    fp8: tuple[str, str] | None = None

    def but(self, **changes: Any) -> GroupedCase:
        return replace(self, **changes)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    @property
    def reduces(self) -> bool:
        return self.op in (SCATTER, REDUCE)

    @property
    def num_weights(self) -> int:
        return 2 if self.activation in GATED else 1

    def weight_shape(self, rank: int) -> tuple[int, int, int]:
        n, k = self.shape
        extra = rank if self.own else 0
        return (self.num_experts, n, k + extra) if self.reduces else (self.num_experts, n + extra, k)


class GroupedOperands(NamedTuple):
    """Of all ranks: x (of a gather one per rank, else as many as there are ranks), weights and biases by rank."""

    xs: list[Tensor]
    weights: list[list[Tensor]]
    biases: list[list[Tensor | None]]
    experts: Tensor
    routing_weights: Tensor

    def own(self, case: GroupedCase, rank: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """What this rank passes, each a tensor of its own: x, the routing's weights, weights, biases."""
        low, high = _range(case, rank) if case.op == GATHER else (0, case.tokens)
        tensors = [self.xs[rank], self.routing_weights[low:high], *self.weights[rank], *self.biases[rank]]
        return [one.to(device, copy=True) for one in tensors if one is not None]


def operands(case: GroupedCase) -> GroupedOperands:
    world, shared = len(case.sizes), case.reduces
    rows = case.tokens * case.top_k
    xs = []
    for rank, size in enumerate(case.sizes):
        if case.op == COPY:
            xs.append(_tensor(case, (case.tokens, case.shape[1]), "x", 0))
        elif case.op == GATHER:
            xs.append(_tensor(case, (size, case.shape[1]), "x", rank))
        else:
            xs.append(_tensor(case, (rows, case.weight_shape(rank)[2]), "x", rank))
    weights = [
        [_tensor(case, case.weight_shape(rank), f"w{i}", rank) for i in range(case.num_weights)]
        for rank in range(world)
    ]
    biases: list[list[Tensor | None]] = [
        [
            _tensor(case, case.weight_shape(rank)[:2], f"b{i}", 0 if shared else rank) if case.bias else None
            for i in range(case.num_weights)
        ]
        for rank in range(world)
    ]
    generator = torch.Generator().manual_seed(case.call * 1000 + case.tokens)
    usable = case.num_experts - (case.load == "few")
    scores = torch.rand(case.tokens, usable, generator=generator)
    if case.load == "one":
        scores[:, 1] = 2.0
    experts = scores.topk(case.top_k, 1).indices
    shape = (case.tokens, case.top_k)
    routing_weights = payload(shape, case.routing_dtype, call=case.call, name="routing")
    if case.integers:
        routing_weights = torch.randint(-2, 3, shape, generator=generator).to(case.routing_dtype)
    return GroupedOperands(xs, weights, biases, experts, routing_weights)


def _tensor(case: GroupedCase, shape: tuple[int, ...], name: str, rank: int) -> Tensor:
    make = integer_payload if case.integers else payload
    made = make(shape, case.dtype, rank=rank, call=case.call, name=name)
    return made.transpose(-1, -2).contiguous().transpose(-1, -2) if case.strided and made.dim() > 1 else made


def _range(case: GroupedCase, rank: int) -> tuple[int, int]:
    start = offsets(case.sizes)[rank]
    return start, start + case.sizes[rank]


def upstream(case: GroupedCase, parts: GroupedOperands, rank: int) -> Tensor:
    """A gradient for this rank's output; of an output that all ranks have the same."""
    if case.op == SCATTER:
        return _tensor(case, (case.sizes[rank], case.shape[0]), "dy", rank)
    if case.op == REDUCE:
        return _tensor(case, (case.tokens, case.shape[0]), "dy", 0)
    return _tensor(case, (case.tokens * case.top_k, parts.weights[rank][0].shape[1]), "dy", rank)


def call(
    case: GroupedCase, parts: GroupedOperands, own: list[Tensor], group: Any, scales: dict[str, Any] | None = None
) -> list[Tensor]:
    """The op on tensors of `parts.own`: its output, and of a gather the routing, and x if it was asked for."""
    rank = dist.get_rank(group)
    low, high = _range(case, rank) if case.op == GATHER else (0, case.tokens)
    x, routing_weights, *rest = own
    weights, biases = rest[: case.num_weights], rest[case.num_weights :]
    routing = tpk.Routing(parts.experts[low:high].to(x.device), routing_weights)
    options: dict[str, Any] = {"implementation": case.implementation, "bias": biases or None, **(scales or {})}
    if case.op == SCATTER:
        options["bias"] = biases[0] if biases else None
        return [tpk.grouped_matmul_reduce_scatter(x, weights[0], routing, group, shard_sizes=case.sizes, **options)]
    if case.op == REDUCE:
        options["bias"] = biases[0] if biases else None
        return [tpk.grouped_matmul_all_reduce(x, weights[0], routing, group, **options)]
    of: Any = weights if case.num_weights > 1 else weights[0]
    options["activation"] = case.activation
    if case.op == COPY:
        return [tpk.copy_grouped_matmul(x, of, routing, group, **options)]
    options |= {"return_gathered": case.return_gathered, "save_gathered": case.save_gathered}
    h, whole, *gathered = tpk.all_gather_grouped_matmul(x, of, routing, group, shard_sizes=case.sizes, **options)
    return [h, *whole, *gathered]


def judge(case: GroupedCase, group: Any, *, backward: bool = True, device: torch.device | str = "cpu") -> list[Tensor]:
    """Run the case on this rank, with tensors on the device, judge values and gradients, and return both."""
    rank, parts = dist.get_rank(group), operands(case)
    if case.fp8 is not None:
        return _judge_fp8(case, parts, group, device)
    own = parts.own(case, rank, device)
    kept = [one.clone() for one in own]
    for one in own:
        one.requires_grad_(backward)
    outs = call(case, parts, own, group)
    what = f"rank {rank}, {case}"
    for now, before in zip(own, kept, strict=True):
        assert_bitwise_equal(now.detach(), before, f"{what}: an input after the call")
    _check_values(case, parts, outs, rank, what)
    if not backward:
        return outs
    dys = [upstream(case, parts, r) for r in range(len(case.sizes))]
    grads = [dys[rank]]
    targets = outs[:1]
    if case.op == GATHER:
        targets.append(outs[2])
        grads.append(payload(outs[2].shape, outs[2].dtype, name="d routing"))
    if case.return_gathered:
        targets.append(outs[3])
        grads.append(payload(outs[3].shape, outs[3].dtype, rank=rank, name="d gathered"))
    grads = [grad.to(device) for grad in grads]
    found: list[Tensor | None] = list(torch.autograd.grad(targets, own, grads, allow_unused=case.op == COPY))
    for name, grad, bound in zip(_names(case), found, expected_gradients(case, parts, dys, rank), strict=True):
        if bound is None:
            assert grad is None, f"{what}: d {name}"
        else:
            assert grad is not None, f"{what}: d {name}"
            bound.check(grad, f"{what}: d {name}")
    return [*outs, *[grad for grad in found if grad is not None]]


def _judge_fp8(case: GroupedCase, parts: GroupedOperands, group: Any, device: torch.device | str) -> list[Tensor]:
    """The same of fp8 operands, which have no gradient."""
    assert case.fp8 is not None
    rank, (per_x, per_w) = dist.get_rank(group), case.fp8
    kinds = ("row", "tensor") if per_x == "mixed" else (per_x,)
    xs = [fp8_of(x, kinds[r % len(kinds)], integers=case.integers) for r, x in enumerate(parts.xs)]
    weights = [[fp8_of(w, per_w, integers=case.integers) for w in several] for several in parts.weights]
    _, routing_weights, *rest = parts.own(case, rank, device)
    x, *own_weights = [one.to(device) for one in (xs[rank], *weights[rank])]
    own = [x.numbers, routing_weights, *(w.numbers for w in own_weights), *rest[case.num_weights :]]
    scales: list[Tensor] = [w.scale for w in own_weights]
    kept = [one.clone() for one in (*own, *scales)]
    outs = call(
        case, parts, own, group,
        {
            "scale_x": x.scale, "scale_weight": scales if case.num_weights > 1 else scales[0],
            "out_dtype": case.dtype,
        },
    )  # fmt: skip
    what = f"rank {rank}, {case}"
    for now, before in zip((*own, *scales), kept, strict=True):
        assert_bitwise_equal(now, before, f"{what}: an input after the call")
    assert outs[0].dtype == case.dtype, f"{what}: {outs[0].dtype}"
    bounded: list[list[Any]] = [[w.bounded(device) for w in several] for several in weights]
    _check_values(case, parts._replace(xs=[x.exact for x in xs], weights=bounded), outs, rank, what)
    return outs


def _names(case: GroupedCase) -> list[str]:
    biases = ["bias"] * (case.num_weights if case.bias else 0)
    return ["x", "routing", *["weights"] * case.num_weights, *biases]


def expected_value(case: GroupedCase, parts: GroupedOperands, rank: int) -> Bounded:
    """One rank's h or y within its bound."""
    if not case.reduces:
        before = _before(case, parts, rank)
        settings: Any = {"dtype": case.dtype, "input_rounded": case.fp8 is None or case.op == COPY}
        if case.activation in GATED:
            return before[0].gated(case.activation, before[1], **settings).rounded(case.dtype)
        return before[0].activation(case.activation, **settings).rounded(case.dtype)
    y = expected.reduced(
        [[x] for x in parts.xs], [[w[0]] for w in parts.weights], parts.experts, parts.routing_weights,
        dtype=case.dtype, bias=parts.biases[0][0],
    )  # fmt: skip
    low, high = _range(case, rank) if case.op == SCATTER else (0, case.tokens)
    return y.narrow(0, low, high - low)


def _check_values(case: GroupedCase, parts: GroupedOperands, outs: list[Tensor], rank: int, what: str) -> None:
    assert all(out.is_contiguous() for out in outs), f"{what}: strides"
    expected_value(case, parts, rank).check(outs[0].detach(), what)
    if case.op == GATHER:
        assert_bitwise_equal(outs[1], parts.experts, f"{what}: experts")
        assert_bitwise_equal(outs[2].detach(), parts.routing_weights, f"{what}: weights of the routing")
        if case.return_gathered:
            gathered = outs[3].detach() if case.fp8 is None else Fp8(outs[3], outs[4]).exact
            assert_bitwise_equal(gathered, torch.cat(parts.xs), f"{what}: gathered")


def _whole_x(case: GroupedCase, parts: GroupedOperands) -> Tensor:
    return torch.cat(parts.xs) if case.op == GATHER else parts.xs[0]


def _before(case: GroupedCase, parts: GroupedOperands, rank: int) -> list[Bounded]:
    x, pairs = _whole_x(case, parts), zip(parts.weights[rank], parts.biases[rank], strict=True)
    return [expected.products(x, w, parts.experts, dtype=case.dtype, bias=b) for w, b in pairs]


def _dzs(case: GroupedCase, parts: GroupedOperands, dy: Tensor, rank: int) -> list[Bounded]:
    if case.activation is None:
        return [Bounded.exact(dy)]
    before = _before(case, parts, rank)
    if case.activation in GATED:
        return [*before[0].gated_gradient(case.activation, before[1], dy, dtype=case.dtype)]
    return [before[0].activation_gradient(case.activation, dy, dtype=case.dtype).rounded(case.dtype)]


def expected_gradients(
    case: GroupedCase, parts: GroupedOperands, dys: Sequence[Tensor], rank: int
) -> list[Bounded | None]:
    """Of what `GroupedOperands.own` lists, in that order; None: there is no gradient."""
    dtype, experts, count = case.dtype, parts.experts, case.num_experts
    if case.reduces:
        dy = torch.cat(list(dys)) if case.op == SCATTER else dys[0]
        h, w, bias = parts.xs[rank], parts.weights[rank][0], parts.biases[rank][0]
        v = expected.products(dy, w.transpose(1, 2), experts, dtype=dtype).rounded(dtype)
        dh = v.times(expected.of_rows(parts.routing_weights, experts).unsqueeze(1)).rounded(dtype)
        dr = expected.routing_gradient(
            dy, parts.xs, [one[0] for one in parts.weights], experts, dtype=dtype, to=case.routing_dtype, bias=bias
        )
        dw = expected.reduced_weight_gradient(dy, h, experts, parts.routing_weights, count, dtype=dtype)
        found: list[Bounded | None] = [dh, dr, dw]
        if bias is not None:
            found.append(expected.reduced_bias_gradient(dy, experts, parts.routing_weights, count, dtype=dtype))
        return found
    dzs = [_dzs(case, parts, dy, r) for r, dy in enumerate(dys)]
    transposed = [[w.transpose(1, 2) for w in ws] for ws in parts.weights]
    dx = expected.reduced(dzs, transposed, experts, None, dtype=dtype)
    if case.return_gathered:
        of_x = sum(payload(dx.shape, dtype, rank=r, name="d gathered").double() for r in range(len(case.sizes)))
        assert isinstance(of_x, Tensor)
        dx = dx.plus(of_x).rounded(dtype).rounded(dtype)
    d_routing: Bounded | None = None
    if case.op == GATHER:
        low, high = _range(case, rank)
        dx = dx.narrow(0, low, high - low)
        d_routing = Bounded.exact(payload(parts.routing_weights.shape, case.routing_dtype, name="d routing")[low:high])
    x = _whole_x(case, parts)
    dws = [expected.weight_gradient(dz, x, experts, count, dtype=dtype) for dz in dzs[rank]]
    dbs = [expected.bias_gradient(dz, experts, count, dtype=dtype) for dz in dzs[rank]] if case.bias else []
    return [dx, d_routing, *dws, *dbs]
