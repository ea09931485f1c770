"""The bound itself: correct results of torch's own linears stay inside in every dtype, subtle mistakes do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tpkernels.testing.expected import (
    check_all_gather_matmul,
    check_bias_gradient,
    check_input_gradient,
    check_matmul_reduce_scatter,
    check_weight_gradient,
    expected_all_gather_matmul,
    expected_bias_gradient,
    expected_input_gradient,
    expected_matmul_all_reduce,
    expected_weight_gradient,
)
from tpkernels.testing.numeric import (
    ACTIVATIONS,
    FP8_SUM_LOSS,
    Bounded,
    BoundExceeded,
    assert_bitwise_equal,
    assert_within_bound,
)
from tpkernels.testing.payload import exact_limit, exact_matmul, integer_payload, payload

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LOW = [torch.bfloat16, torch.float16]
SHAPES = [(3, 5, 1), (1, 7, 2), (5, 3, 4), (33, 65, 300), (4, 3, 8192)]


def activate(x: Tensor, name: str | None) -> Tensor:
    if name is None:
        return x
    return {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
    }[name](x)


def operands(m: int, n: int, k: int, dtype: torch.dtype, call: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x = payload((m, k), dtype, name="x", call=call)
    w = payload((n, k), dtype, name="w", call=call, scale=k**-0.5)
    return x, w, payload((n,), dtype, name="b", call=call)


def worst_ratio(expected: Bounded, actual: Tensor) -> float:
    return float(((actual.detach().double() - expected.value).abs() / expected.error).nan_to_num(0).max())


# ---------------------------------------------------------------- correct results pass


@pytest.mark.sample(50)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_torch_linear_and_its_gradients_are_within_the_bound(
    m: int, n: int, k: int, dtype: torch.dtype, activation: str | None
) -> None:
    for call in range(3):
        x, w, b = (t.requires_grad_() for t in operands(m, n, k, dtype, call))
        y = activate(F.linear(x, w, b), activation)
        check_all_gather_matmul(y, x, w, bias=b, activation=activation, gathered=x.clone())
        dy = payload((m, n), dtype, name="dy", call=call)
        dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
        upstream: Tensor | Bounded = dy
        if activation is not None:
            before = Bounded.sum_of_products([x], [w], bias=b, dtype=dtype)
            upstream = before.activation_gradient(activation, dy, dtype=dtype).rounded(dtype)
        check_input_gradient(dx, [upstream], [w.detach()])
        check_weight_gradient(dw, upstream, x)
        check_bias_gradient(db, upstream)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_bound_is_no_wider_than_what_correct_results_use(dtype: torch.dtype) -> None:
    x, w, b = operands(64, 64, 1024, dtype)
    dy = payload((64, 64), dtype, name="dy")
    assert worst_ratio(expected_all_gather_matmul(x, w, bias=b, dtype=dtype), F.linear(x, w, b)) > 0.8
    assert worst_ratio(expected_input_gradient([dy], [w], dtype=dtype), dy @ w) > 0.8
    assert worst_ratio(expected_weight_gradient(dy, x, dtype=dtype), dy.T @ x) > 0.8
    assert worst_ratio(expected_bias_gradient(dy, dtype=dtype), dy.sum(0)) > 0.5
    for name in ACTIVATIONS:
        expected = expected_all_gather_matmul(x, w, bias=b, activation=name, dtype=dtype)
        assert worst_ratio(expected, activate(F.linear(x, w, b), name)) > 0.5, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_of_two_linears_is_within_the_propagated_bound(dtype: torch.dtype) -> None:
    """A parallel MLP: columns of the first weight and of the second on each of three ranks."""
    x, _, _ = operands(16, 1, 64, dtype)
    up = [payload((20, 64), dtype, rank=r, name="up", scale=1 / 8) for r in range(3)]
    down = [payload((32, 20), dtype, rank=r, name="down", scale=1 / 8) for r in range(3)]
    partials = [F.gelu(x @ u.T) @ d.T for u, d in zip(up, down, strict=True)]
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    y = torch.stack(partials).to(accumulate).sum(0).to(dtype)
    hidden = [expected_all_gather_matmul(x, u, activation="gelu", dtype=dtype) for u in up]
    expected = expected_matmul_all_reduce(hidden, down, dtype=dtype)
    expected.check(y)
    hidden[1] = expected_all_gather_matmul(x, up[1].roll(1, 0), activation="gelu", dtype=dtype)
    with pytest.raises(BoundExceeded):
        expected_matmul_all_reduce(hidden, down, dtype=dtype).check(y)


@pytest.mark.parametrize("scatter_dim", [0, 1, -1])
@pytest.mark.parametrize("shard_sizes", [None, (0, 5, 2)])
def test_a_scattered_shard_is_judged_by_its_own_part(scatter_dim: int, shard_sizes: tuple[int, ...] | None) -> None:
    x_parts = [payload((7, 7, 5), rank=r, name="x") for r in range(3)]
    w_parts = [payload((7, 5), rank=r, name="w") for r in range(3)]
    bias = payload((7,), name="b")
    y = sum(x @ w.T for x, w in zip(x_parts, w_parts, strict=True)) + bias
    shards = y.split(list(shard_sizes or (3, 2, 2)), scatter_dim)
    for rank, shard in enumerate(shards):
        check_matmul_reduce_scatter(
            shard, x_parts, w_parts, rank=rank, bias=bias, scatter_dim=scatter_dim, shard_sizes=shard_sizes
        )
    with pytest.raises(BoundExceeded, match="on rank 2"):
        check_matmul_reduce_scatter(
            shards[1].narrow(scatter_dim, 0, 2),
            x_parts,
            w_parts,
            rank=2,
            bias=bias,
            scatter_dim=scatter_dim,
            shard_sizes=shard_sizes,
        )


# ---------------------------------------------------------------- the constants of the derivation


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_constants_of_an_activation_bound_its_derivatives(name: str) -> None:
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(activate(x, name).sum(), x, create_graph=True)
    limits = ACTIVATIONS[name]
    assert limits.first * 0.99 < float(first.detach().abs().max()) <= limits.first
    if limits.second is not None:
        (second,) = torch.autograd.grad(first.sum(), x)
        assert limits.second * 0.99 < float(second.abs().max()) <= limits.second + 1e-4


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_evaluating_an_activation_costs_no_more_than_allowed(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-12, 12, 200_001, dtype=dtype)
        eps = torch.finfo(dtype).eps
        # fp64 is judged by torch's own fp64, which differs by the order of operations of scalar and vector code only
        error = (activate(x, name).double() - activate(x.double(), name)).abs()
        assert bool((error <= 4 * eps * x.double().abs() + torch.finfo(dtype).tiny).all())


def test_fp16_results_below_the_normal_range_pass() -> None:
    x, w, _ = operands(32, 32, 64, torch.float16)
    x = x * 2.0**-18
    y = F.linear(x, w)
    assert bool(((y != 0) & (y.abs() < torch.finfo(torch.float16).tiny)).any())
    check_all_gather_matmul(y, x, w)


# ---------------------------------------------------------------- mistakes are caught


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_with_a_missing_partial_or_row_are_caught(dtype: torch.dtype) -> None:
    dy = [payload((24, 8), dtype, rank=r, name="dy") for r in range(3)]
    w = [payload((8, 16), dtype, rank=r, name="w") for r in range(3)]
    x = payload((24, 16), dtype, name="x")
    dx = sum(g.double() @ v.double() for g, v in zip(dy, w, strict=True))
    check_input_gradient(dx.to(dtype), dy, w)
    check_input_gradient(dx[8:16].to(dtype), dy, w, start=8)
    dx[9] -= dy[1][9].double() @ w[1].double()
    with pytest.raises(BoundExceeded, match=r"all within \[9:10, 0:16\]"):
        check_input_gradient(dx.to(dtype), dy, w)
    with pytest.raises(BoundExceeded):
        check_weight_gradient((dy[0][1:].double().T @ x[1:].double()).to(dtype), dy[0], x)
    with pytest.raises(BoundExceeded):
        check_bias_gradient(dy[0][1:].double().sum(0).to(dtype), dy[0])


def test_the_two_gelus_are_told_apart_in_fp32() -> None:
    x, w, b = operands(32, 32, 16, torch.float32)
    y = F.gelu(F.linear(x, w, b))
    with pytest.raises(BoundExceeded):
        check_all_gather_matmul(y, x, w, bias=b, activation="gelu_tanh")


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rounding_once_too_often_is_caught(dtype: torch.dtype) -> None:
    x, w, _ = operands(64, 64, 256, dtype)
    y = sum((x[:, i::4] @ w[:, i::4].T for i in range(4)), start=torch.zeros(64, 64, dtype=dtype))
    with pytest.raises(BoundExceeded):
        check_all_gather_matmul(y, x, w)


def test_nan_and_inf_must_stand_where_the_reference_has_them() -> None:
    x, w, _ = operands(8, 8, 8, torch.float32)
    x[2, 3], x[5, 5] = math.nan, math.inf
    y = F.linear(x, w)
    assert y[2].isnan().all() and y[5].isinf().all()
    check_all_gather_matmul(y, x, w)
    for index, value in (((2, 0), 1.0), ((5, 1), -float(y[5, 1])), ((5, 1), math.nan), ((0, 0), math.inf)):
        wrong = y.clone()
        wrong[index] = value
        with pytest.raises(BoundExceeded, match=rf"1 of 64 elements .* worst at \[{index[0]}, {index[1]}\]"):
            check_all_gather_matmul(wrong, x, w)


def test_fp16_overflow_is_inf_and_only_there() -> None:
    reference = torch.tensor([70000.0, 65519.9, 60000.0, -70000.0], dtype=torch.float64)
    bound = 2.0**-11 * reference.abs()
    assert_within_bound(torch.tensor([math.inf, 65504, 60000, -math.inf], dtype=torch.float16), reference, bound)
    assert_within_bound(torch.tensor([math.inf, math.inf, 60000, -math.inf], dtype=torch.float16), reference, bound)
    for wrong in (
        [math.inf, 65504, math.inf, -math.inf],
        [math.inf, 65504, 60000, math.inf],
        [3, 65504, 60000, -60000],
    ):
        with pytest.raises(BoundExceeded):
            assert_within_bound(torch.tensor(wrong, dtype=torch.float16), reference, bound)


def test_the_message_shows_the_worst_element_and_where_all_are() -> None:
    reference, bound = torch.zeros(4, 6, dtype=torch.float64), torch.full((4, 6), 0.5, dtype=torch.float64)
    actual = torch.zeros(4, 6)
    actual[1, 2], actual[3, 4] = 1.0, -2.0
    with pytest.raises(BoundExceeded) as caught:
        assert_within_bound(actual, reference, bound, "dx on rank 1")
    assert str(caught.value) == (
        "dx on rank 1: 2 of 24 elements (8.33%) exceed the bound, all within [1:4, 2:5]; worst at [3, 4]: "
        "actual -2.0, reference 0.0, |difference| 2.000e+00, bound 5.050e-01, ratio 3.96 (torch.float32, shape (4, 6))"
    )
    assert (caught.value.index, caught.value.count, caught.value.box) == ((3, 4), 2, ((1, 4), (2, 5)))


def test_shapes_must_agree_and_nothing_may_be_nothing() -> None:
    with pytest.raises(AssertionError, match=r"y: shape \(2, 3\), expected \(3, 2\)"):
        assert_within_bound(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3, 2), "y")
    check_all_gather_matmul(torch.zeros(0, 5), torch.zeros(0, 4), torch.zeros(5, 4))
    check_all_gather_matmul(torch.zeros(3, 5), torch.zeros(3, 0), torch.zeros(5, 0))
    with pytest.raises(BoundExceeded):
        check_all_gather_matmul(torch.ones(3, 5), torch.zeros(3, 0), torch.zeros(5, 0))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Bounded.sum_of_products([], [], dtype=torch.float32), r"a_parts \(0\) and b_parts \(0\) must pair up"),
        (
            lambda: Bounded.sum_of_products([torch.ones(2, 3)], [torch.ones(2, 4)], dtype=torch.float32),
            r"a_part \(2, 3\) and b_part \(2, 4\) must have the same last dim",
        ),
        (
            lambda: Bounded.exact(torch.ones(1)).activation("tanh", dtype=torch.float32),
            "activation .'tanh'. must be None or one of 'relu', 'gelu', 'gelu_tanh', 'silu'",
        ),
    ],
)
def test_wrong_operands_are_named(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]


# ---------------------------------------------------------------- bits and payloads


def test_bitwise_comparison_names_the_first_difference() -> None:
    x = torch.arange(6.0).reshape(2, 3).bfloat16()
    assert_bitwise_equal(x, x.clone())
    y = x.clone()
    y[1, 0] = 3.0156
    with pytest.raises(BoundExceeded, match=r"gather: 1 of 6 elements differ .* \[1:2, 0:1\]; first at \[1, 0\]"):
        assert_bitwise_equal(y, x, "gather")
    with pytest.raises(AssertionError, match=r"torch.float32 \(2, 3\), expected torch.bfloat16 \(2, 3\)"):
        assert_bitwise_equal(x.float(), x)


def test_bitwise_comparison_sees_signed_zeros_and_nan() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert_bitwise_equal(nan, nan.clone())
    negative = torch.tensor([math.nan, -0.0])
    with pytest.raises(BoundExceeded):
        assert_bitwise_equal(nan, negative)
    assert_bitwise_equal(nan, negative, either_zero=True)


def test_payloads_differ_by_rank_call_and_name_and_are_reproducible() -> None:
    keys = [(r, c, n) for r in range(4) for c in range(4) for n in ("x", "w")]
    for make in (payload, integer_payload):
        tensors = {key: make((6, 16), torch.float32, rank=key[0], call=key[1], name=key[2]) for key in keys}
        assert len({tuple(t.flatten().tolist()) for t in tensors.values()}) == len(keys)
        assert torch.equal(tensors[2, 3, "x"], make((6, 16), torch.float32, rank=2, call=3, name="x"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integer_payloads_sum_exactly_in_any_order(dtype: torch.dtype) -> None:
    x_parts = [integer_payload((24, 512), dtype, rank=r, name="x") for r in range(8)]
    w_parts = [integer_payload((16, 512), dtype, rank=r, name="w", nonzeros=512) for r in range(8)]
    bias = integer_payload((16,), dtype, name="b", largest=7, nonzeros=16)
    exact = exact_matmul(x_parts, w_parts, bias=bias, dtype=dtype)
    in_low_precision = bias.clone()
    for r in (3, 1, 0, 2, 7, 6, 4, 5):
        in_low_precision = in_low_precision + x_parts[r] @ w_parts[r].T
    assert_bitwise_equal(in_low_precision, exact, either_zero=True)
    assert 0 < len(set(exact.flatten().tolist()))
    assert float(exact.abs().max()) > 4


def test_inputs_whose_sums_are_not_exact_are_refused() -> None:
    dense = torch.ones(1, 257, dtype=torch.bfloat16)
    assert exact_limit(torch.bfloat16) == 256 and exact_limit(torch.float16) == 2048
    with pytest.raises(ValueError, match=r"partial sums reach 257, but torch.bfloat16 is exact only up to 256"):
        exact_matmul([dense], [dense], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="operands must be integers"):
        exact_matmul([dense / 2], [dense / 2], dtype=torch.float32)


def test_the_worst_ratio_is_over_1_exactly_where_the_check_raises() -> None:
    reference = Bounded(torch.tensor([1.0, -2.0, 0.0]).double(), torch.tensor([0.5, 1.0, 0.0]).double())
    nan, inf = float("nan"), float("inf")
    cases = {(1.0, -2.0, 0.0): 0.0, (1.25, -2.0, 0.0): 0.5 / 1.01, (1.0, -4.0, 0.0): 2 / 1.01, (1.0, -2.0, 1e-30): inf,
             (nan, -2.0, 0.0): inf, (1.0, inf, 0.0): inf}  # fmt: skip
    for values, ratio in cases.items():
        actual = torch.tensor(values)
        assert reference.worst_ratio(actual) == pytest.approx(ratio)
        if ratio <= 1:
            reference.check(actual)
        else:
            with pytest.raises(BoundExceeded):
                reference.check(actual)
    assert reference.worst_ratio(torch.ones(2)) == inf and Bounded.exact(torch.ones(0)).worst_ratio(torch.ones(0)) == 0
    same = torch.tensor([nan, inf])
    assert Bounded.exact(same).worst_ratio(same) == 0


def sum_of_14_bits(x: Tensor, w: Tensor, block: int = 128, step: int = 32, bits: int = 14) -> Tensor:
    """x w^T as an fp8 tensor core computes it, every block of products into an fp32 sum.

    The 32 products of a step and the sum so far lose what lies below 14 bits of the largest of them.
    """
    total = torch.zeros(x.shape[0], w.shape[0])
    for first in range(0, x.shape[1], block):
        part = torch.zeros(*total.shape, 1, dtype=torch.float64)
        for k in range(first, min(first + block, x.shape[1]), step):
            products = x[:, None, k : k + step].double() * w[None, :, k : k + step].double()
            terms = torch.cat([products, part], -1)
            unit = 2.0 ** (terms.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() + 1 - bits)
            part = (terms / unit).trunc().mul(unit).sum(-1, keepdim=True)
        total += part[..., 0].float()
    return total


@pytest.mark.parametrize("k", [64, 512, 4096])
def test_sums_of_a_tensor_core_are_within_the_bound_for_fp8_and_one_that_lacks_a_step_is_not(k: int) -> None:
    x, w = (payload((24, k), name=name).to(torch.float8_e4m3fn) for name in "xw")
    one = torch.ones(())

    def bound(sums_lose: float) -> Bounded:
        left, right = Bounded.scaled(x, one, sums_lose=sums_lose), Bounded.scaled(w, one)
        return Bounded.sum_of_products([left], [right], dtype=torch.float32).rounded(torch.float32)

    kept = sum_of_14_bits(x, w)
    assert 0.01 < bound(FP8_SUM_LOSS).worst_ratio(kept) < 0.3
    assert bound(FP8_SUM_LOSS).worst_ratio(sum_of_14_bits(x, w, bits=13)) < 0.6
    assert bound(0.0).worst_ratio(kept) > 1, "the bound of fp32 would do: this one shows nothing"
    short = sum_of_14_bits(x[:, : k - 32], w[:, : k - 32])
    with pytest.raises(BoundExceeded):
        bound(FP8_SUM_LOSS).check(short)
