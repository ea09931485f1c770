"""Cases of the ops whose experts are dealt out over the ranks: one call in terms of whole tensors, and its judge.

What must come out is in `grouped_expected.py`, within the elementwise fp64 bound. Every rank can make the operands of
all ranks by itself. In the order of the rows, those of a rank's experts are one range of those of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.partition import array_split_sizes, offsets
from tpkernels.testing import grouped_expected as expected
from tpkernels.testing.fp8_operands import fp8_of
from tpkernels.testing.numeric import GATED, Bounded, assert_bitwise_equal
from tpkernels.testing.payload import integer_payload, payload

__all__ = [
    "COMBINE",
    "DEALT",
    "DISPATCH",
    "DealtCase",
    "DealtOperands",
    "call",
    "expected_gradients",
    "expected_value",
    "judge",
    "names",
    "operands",
    "upstream",
    "upstream_of",
]

DISPATCH, COMBINE = DEALT = ("dispatch_grouped_matmul", "grouped_matmul_combine")


@dataclass(frozen=True)
class DealtCase:
    """One call. `sizes`: tokens of every rank; `shape`: (N, K) of each expert's weight.

    dealt: experts of every rank, by default as even as may be. load: "mixed", "one" (all tokens have expert 1 first) or
    "few" (the last expert has none). integers: every order of summation gives the same bits. call: another one gives
    other values. fp8: as of a `GroupedCase`.
    """

    op: str
    sizes: tuple[int, ...]
    shape: tuple[int, int] = (6, 8)
    num_experts: int = 5
    top_k: int = 2
    dealt: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    routing_dtype: torch.dtype = torch.float32
    bias: bool = False
    activation: str | None = None
    load: str = "mixed"
    strided: bool = False
    integers: bool = False
    implementation: str = "chunked"
    call: int = 0
    fp8: tuple[str, str] | None = None

    def but(self, **changes: Any) -> DealtCase:
        return replace(self, **changes)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        return self.dealt or array_split_sizes(self.num_experts, len(self.sizes))

    @property
    def combines(self) -> bool:
        return self.op == COMBINE

    @property
    def num_weights(self) -> int:
        return 2 if self.activation in GATED else 1

    def tokens_of(self, rank: int) -> slice:
        start = offsets(self.sizes)[rank]
        return slice(start, start + self.sizes[rank])

    def experts_of(self, rank: int) -> slice:
        start = offsets(self.expert_sizes)[rank]
        return slice(start, start + self.expert_sizes[rank])


class DealtOperands(NamedTuple):
    """Whole: x of all tokens or h of all rows, the weights and biases of all experts, the routing of all tokens."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    experts: Tensor
    routing_weights: Tensor

    def rows_of(self, case: DealtCase, rank: int) -> slice:
        """Of all rows, those of the experts of a rank."""
        experts, numbers = case.experts_of(rank), self.experts.flatten().tolist()
        low = sum(number < experts.start for number in numbers)
        return slice(low, sum(number < experts.stop for number in numbers))

    def own(self, case: DealtCase, rank: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """What this rank passes, each a tensor of its own: x, the routing's weights, weights, biases."""
        experts, tokens = case.experts_of(rank), case.tokens_of(rank)
        routing = self.routing_weights if case.combines else self.routing_weights[tokens]
        x = self.x[self.rows_of(case, rank) if case.combines else tokens]
        found = [x, routing, *(w[experts] for w in self.weights), *(b[experts] for b in self.biases if b is not None)]
        return [one.to(device, copy=True) for one in found]


def operands(case: DealtCase) -> DealtOperands:
    n, k = case.shape
    x = _tensor(case, (case.tokens * case.top_k if case.combines else case.tokens, k), "x")
    weights = [_tensor(case, (case.num_experts, n, k), f"w{i}") for i in range(case.num_weights)]
    biases = [_tensor(case, (case.num_experts, n), f"b{i}") if case.bias else None for i in range(case.num_weights)]
    generator = torch.Generator().manual_seed(case.call * 1000 + case.tokens)
    scores = torch.rand(case.tokens, case.num_experts - (case.load == "few"), generator=generator)
    if case.load == "one":
        scores[:, 1] = 2.0
    experts, shape = scores.topk(case.top_k, 1).indices, (case.tokens, case.top_k)
    routing_weights = payload(shape, case.routing_dtype, call=case.call, name="routing")
    if case.integers:
        routing_weights = torch.randint(-2, 3, shape, generator=generator).to(case.routing_dtype)
    return DealtOperands(x, weights, biases, experts, routing_weights)


def _tensor(case: DealtCase, shape: tuple[int, ...], name: str) -> Tensor:
    made = (integer_payload if case.integers else payload)(shape, case.dtype, call=case.call, name=name)
    return made.transpose(-1, -2).contiguous().transpose(-1, -2) if case.strided and made.dim() > 1 else made


def upstream(case: DealtCase) -> Tensor:
    """A gradient for the whole output: by token of a combination, else by row."""
    return _tensor(case, (case.tokens if case.combines else case.tokens * case.top_k, case.shape[0]), "dy")


def upstream_of(case: DealtCase, parts: DealtOperands, rank: int) -> Tensor:
    return upstream(case)[case.tokens_of(rank) if case.combines else parts.rows_of(case, rank)]


def call(
    case: DealtCase, parts: DealtOperands, own: list[Tensor], group: Any, scales: dict[str, Any] | None = None
) -> list[Tensor]:
    """The op on tensors of `parts.own`: its output, and of a dispatch the routing of all tokens."""
    rank = dist.get_rank(group)
    x, routing_weights, *rest = own
    weights, biases = rest[: case.num_weights], rest[case.num_weights :]
    experts = parts.experts if case.combines else parts.experts[case.tokens_of(rank)]
    routing = tpk.Routing(experts.to(x.device), routing_weights)
    even = len(set(case.expert_sizes)) == 1
    options: dict[str, Any] = {"implementation": case.implementation, "shard_sizes": case.sizes, **(scales or {})}
    options["expert_sizes"] = None if even else case.expert_sizes
    if case.combines:
        bias = biases[0] if biases else None
        return [tpk.grouped_matmul_combine(x, weights[0], routing, group, bias=bias, **options)]
    of: Any = weights if case.num_weights > 1 else weights[0]
    options |= {"activation": case.activation, "bias": biases or None}
    h, whole = tpk.dispatch_grouped_matmul(x, of, routing, group, **options)
    return [h, *whole]


def judge(case: DealtCase, group: Any, *, backward: bool = True, device: torch.device | str = "cpu") -> list[Tensor]:
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
    assert all(out.is_contiguous() for out in outs), f"{what}: strides"
    expected_value(case, parts, rank).check(outs[0].detach(), what)
    if not case.combines:
        assert_bitwise_equal(outs[1], parts.experts, f"{what}: experts")
        assert_bitwise_equal(outs[2].detach(), parts.routing_weights, f"{what}: weights of the routing")
    if not backward:
        return outs
    targets, grads = outs[:1], [upstream_of(case, parts, rank)]
    if not case.combines:
        targets.append(outs[2])
        grads.append(payload(outs[2].shape, outs[2].dtype, name="d routing"))
    found = torch.autograd.grad(targets, own, [grad.to(device) for grad in grads])
    bounds = expected_gradients(case, parts, rank)
    for name, grad, bound in zip(names(case), found, bounds, strict=True):
        bound.check(grad, f"{what}: d {name}")
    return [*outs, *found]


def _judge_fp8(case: DealtCase, parts: DealtOperands, group: Any, device: torch.device | str) -> list[Tensor]:
    """The same of fp8 operands, which have no gradient."""
    assert case.fp8 is not None
    rank, (per_x, per_w) = dist.get_rank(group), case.fp8
    x = fp8_of(parts.x, per_x, integers=case.integers)
    weights = [fp8_of(w, per_w, integers=case.integers) for w in parts.weights]
    own_x = x.narrow(parts.rows_of(case, rank) if case.combines else case.tokens_of(rank)).to(device)
    own_weights = [w.narrow(case.experts_of(rank)).to(device) for w in weights]
    _, routing_weights, *rest = parts.own(case, rank, device)
    own = [own_x.numbers, routing_weights, *(w.numbers for w in own_weights), *rest[case.num_weights :]]
    scales: Any = [w.scale for w in own_weights]
    outs = call(
        case, parts, own, group,
        {
            "scale_x": own_x.scale, "scale_weight": scales if case.num_weights > 1 else scales[0],
            "out_dtype": case.dtype,
        },
    )  # fmt: skip
    what = f"rank {rank}, {case}"
    assert outs[0].dtype == case.dtype and outs[0].is_contiguous(), f"{what}: {outs[0].dtype}"
    bounded: list[Any] = [w.bounded(device) for w in weights]
    expected_value(case, parts._replace(x=x.exact, weights=bounded), rank).check(outs[0], what)
    if not case.combines:
        assert_bitwise_equal(outs[1], parts.experts, f"{what}: experts")
        assert_bitwise_equal(outs[2], parts.routing_weights, f"{what}: weights of the routing")
    return outs


def names(case: DealtCase) -> list[str]:
    """Of what `DealtOperands.own` lists."""
    return ["x", "routing", *["weights"] * case.num_weights, *["bias"] * (case.num_weights if case.bias else 0)]


def _rows(whole: Bounded, rows: slice) -> Bounded:
    return whole.narrow(0, rows.start, rows.stop - rows.start)


def expected_value(case: DealtCase, parts: DealtOperands, rank: int) -> Bounded:
    """One rank's h or y within its bound."""
    if case.combines:
        y = expected.combined(
            [parts.x], parts.weights, parts.experts, parts.routing_weights, case.expert_sizes, dtype=case.dtype,
            bias=parts.biases[0],
        )  # fmt: skip
        return _rows(y, case.tokens_of(rank))
    before = _before(case, parts)
    settings: Any = {"dtype": case.dtype, "input_rounded": case.fp8 is None}
    if case.activation in GATED:
        h = before[0].gated(case.activation, before[1], **settings).rounded(case.dtype)
    else:
        h = before[0].activation(case.activation, **settings).rounded(case.dtype)
    return _rows(h, parts.rows_of(case, rank))


def _before(case: DealtCase, parts: DealtOperands) -> list[Bounded]:
    pairs = zip(parts.weights, parts.biases, strict=True)
    return [expected.products(parts.x, w, parts.experts, dtype=case.dtype, bias=b) for w, b in pairs]


def expected_gradients(case: DealtCase, parts: DealtOperands, rank: int) -> list[Bounded]:
    """Of what `DealtOperands.own` lists, in that order."""
    dtype, experts, count, dy = case.dtype, parts.experts, case.num_experts, upstream(case)
    tokens, own, rows = case.tokens_of(rank), case.experts_of(rank), parts.rows_of(case, rank)
    if case.combines:
        w, bias = parts.weights[0], parts.biases[0]
        v = expected.products(dy, w.transpose(1, 2), experts, dtype=dtype).rounded(dtype)
        dh = v.times(expected.of_rows(parts.routing_weights, experts).unsqueeze(1)).rounded(dtype)
        dr = expected.routing_gradient(dy, [parts.x], [w], experts, dtype=dtype, to=case.routing_dtype, bias=bias)
        dw = expected.reduced_weight_gradient(dy, parts.x, experts, parts.routing_weights, count, dtype=dtype)
        found = [_rows(dh, rows), dr, _rows(dw, own)]
        if bias is not None:
            db = expected.reduced_bias_gradient(dy, experts, parts.routing_weights, count, dtype=dtype)
            found.append(_rows(db, own))
        return found
    dzs = _dzs(case, parts, dy)
    transposed = [w.transpose(1, 2) for w in parts.weights]
    dx = expected.combined(dzs, transposed, experts, None, case.expert_sizes, dtype=dtype)
    d_routing = Bounded.exact(payload(parts.routing_weights.shape, case.routing_dtype, name="d routing")[tokens])
    dws = [expected.weight_gradient(dz, parts.x, experts, count, dtype=dtype) for dz in dzs]
    dbs = [expected.bias_gradient(dz, experts, count, dtype=dtype) for dz in dzs] if case.bias else []
    return [_rows(dx, tokens), d_routing, *(_rows(one, own) for one in (*dws, *dbs))]


def _dzs(case: DealtCase, parts: DealtOperands, dy: Tensor) -> list[Bounded]:
    if case.activation is None:
        return [Bounded.exact(dy)]
    before = _before(case, parts)
    if case.activation in GATED:
        return [*before[0].gated_gradient(case.activation, before[1], dy, dtype=case.dtype)]
    return [before[0].activation_gradient(case.activation, dy, dtype=case.dtype).rounded(case.dtype)]
