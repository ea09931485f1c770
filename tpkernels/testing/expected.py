"""What the fused ops and their gradients must return, given what every rank holds; results are judged by `numeric`.

The operands of fp8 calls are `Bounded.scaled(numbers, scale)`, and `dtype` is the result's.

Each check takes one rank's result and the operands of all ranks (exact, in the dtype they were passed in), computes the
unfused reference in fp64, and raises `BoundExceeded` naming the worst place. `expected_*` return the `Bounded` itself,
for chains: feed it as an operand of the next step (`expected_all_gather_matmul(...)` of a `Bounded` input), or into
`activation_gradient`.

    all_gather_matmul      y   = act(x_full W^T + b)                 one rounding; with act, one before it too
                           y   = act(x_full G^T + b) (x_full U^T + c)    gated: one more, of act
    matmul_reduce_scatter  y_r = (sum_r x_r W_r^T)[shard r] + b      partials may be rounded to the output dtype
    matmul_all_reduce      y   =  sum_r x_r W_r^T + b                the same
    input gradient         dx  =  sum_r dy_r W_r                     contraction over N, a partial per rank
    weight gradient        dW  =  dy^T x                             contraction over rows
    bias gradient          db  =  sum_rows dy                        contraction over rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.partition import array_split_sizes, offsets
from tpkernels.testing.numeric import Bounded, assert_bitwise_equal

__all__ = [
    "check_all_gather_matmul",
    "check_bias_gradient",
    "check_input_gradient",
    "check_matmul_all_reduce",
    "check_matmul_reduce_scatter",
    "check_weight_gradient",
    "expected_all_gather_matmul",
    "expected_bias_gradient",
    "expected_gated_matmul",
    "expected_input_gradient",
    "expected_matmul_all_reduce",
    "expected_matmul_reduce_scatter",
    "expected_weight_gradient",
]

Operand = Tensor | Bounded


def expected_all_gather_matmul(
    x_full: Operand,
    weight: Operand,
    *,
    dtype: torch.dtype,
    bias: Operand | None = None,
    activation: str | None = None,
    input_rounded: bool = True,
) -> Bounded:
    """input_rounded: whether what goes into the activation may be rounded to `dtype` before, which fp8 ops do not."""
    product = Bounded.sum_of_products([x_full], [weight], bias=bias, dtype=dtype)
    return product.activation(activation, dtype=dtype, input_rounded=input_rounded).rounded(dtype)


def expected_gated_matmul(
    x_full: Operand,
    weights: Sequence[Operand],
    *,
    dtype: torch.dtype,
    activation: str,
    biases: Sequence[Operand | None] = (None, None),
    input_rounded: bool = True,
) -> Bounded:
    """weights, biases: of gate and up. input_rounded: as above, of both products and of the activated gate."""
    gate, up = (
        Bounded.sum_of_products([x_full], [weight], bias=bias, dtype=dtype)
        for weight, bias in zip(weights, biases, strict=True)
    )
    return gate.gated(activation, up, dtype=dtype, input_rounded=input_rounded).rounded(dtype)


def expected_matmul_all_reduce(
    x_parts: Sequence[Operand],
    w_parts: Sequence[Operand],
    *,
    dtype: torch.dtype,
    bias: Operand | None = None,
    partials_rounded: bool = True,
) -> Bounded:
    """partials_rounded: whether an implementation may send its partials in `dtype`; fp32 partials are within it too."""
    rounded = partials_rounded and len(x_parts) > 1
    return Bounded.sum_of_products(x_parts, w_parts, bias=bias, dtype=dtype, partials_rounded=rounded).rounded(dtype)


def expected_matmul_reduce_scatter(
    x_parts: Sequence[Operand],
    w_parts: Sequence[Operand],
    *,
    rank: int,
    dtype: torch.dtype,
    bias: Operand | None = None,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    partials_rounded: bool = True,
) -> Bounded:
    """scatter_dim: any dim of the output; None for shard_sizes is the array_split cut."""
    last = x_parts[0].dim() - 1
    dim = scatter_dim % (last + 1)
    total = w_parts[0].shape[0] if dim == last else x_parts[0].shape[dim]
    sizes = array_split_sizes(total, len(x_parts)) if shard_sizes is None else tuple(shard_sizes)
    start, length = offsets(sizes)[rank], sizes[rank]
    if dim != last:  # only this rank's rows: the reference costs a share of the work
        x_parts = [x.narrow(dim, start, length) for x in x_parts]
    whole = expected_matmul_all_reduce(x_parts, w_parts, dtype=dtype, bias=bias, partials_rounded=partials_rounded)
    return whole.narrow(dim, start, length) if dim == last else whole


def expected_input_gradient(
    dy_parts: Sequence[Operand], w_parts: Sequence[Tensor], *, dtype: torch.dtype, partials_rounded: bool = True
) -> Bounded:
    """Whole dx of a column-parallel linear, [..., K]; narrow it to the rank's shard."""
    transposed = [w.T for w in w_parts]
    return expected_matmul_all_reduce(dy_parts, transposed, dtype=dtype, partials_rounded=partials_rounded)


def expected_weight_gradient(dy: Operand, x: Operand, *, dtype: torch.dtype) -> Bounded:
    left, right = Bounded.exact(dy).rows().transposed(), Bounded.exact(x).rows().transposed()
    return Bounded.sum_of_products([left], [right], dtype=dtype).rounded(dtype)


def expected_bias_gradient(dy: Operand, *, dtype: torch.dtype) -> Bounded:
    rows = Bounded.exact(dy).rows().transposed()
    ones = torch.ones(1, rows.value.shape[-1], dtype=torch.float64)
    column = Bounded.sum_of_products([rows], [ones], dtype=dtype).rounded(dtype)
    return Bounded(column.value.squeeze(-1), column.error.squeeze(-1))


def check_all_gather_matmul(
    y: Tensor,
    x_full: Operand,
    weight: Operand,
    *,
    bias: Operand | None = None,
    activation: str | None = None,
    gathered: Tensor | None = None,
    what: str = "all_gather_matmul",
) -> None:
    """y: one rank's output; gathered: with return_gathered, which must equal `x_full` bit for bit."""
    if gathered is not None:
        if isinstance(x_full, Bounded):
            raise ValueError("gathered can only be compared with an exact x_full (a tensor)")
        assert_bitwise_equal(gathered, x_full, f"{what}: gathered input")
    expected = expected_all_gather_matmul(x_full, weight, dtype=y.dtype, bias=bias, activation=activation)
    expected.check(y, what)


def check_matmul_reduce_scatter(
    y_shard: Tensor,
    x_parts: Sequence[Tensor],
    w_parts: Sequence[Operand],
    *,
    rank: int,
    bias: Operand | None = None,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    partials_rounded: bool = True,
    what: str = "matmul_reduce_scatter",
) -> None:
    expected = expected_matmul_reduce_scatter(
        x_parts,
        w_parts,
        rank=rank,
        dtype=y_shard.dtype,
        bias=bias,
        scatter_dim=scatter_dim,
        shard_sizes=shard_sizes,
        partials_rounded=partials_rounded,
    )
    expected.check(y_shard, f"{what} on rank {rank}")


def check_matmul_all_reduce(
    y: Tensor,
    x_parts: Sequence[Operand],
    w_parts: Sequence[Operand],
    *,
    bias: Operand | None = None,
    partials_rounded: bool = True,
    what: str = "matmul_all_reduce",
) -> None:
    expected = expected_matmul_all_reduce(x_parts, w_parts, dtype=y.dtype, bias=bias, partials_rounded=partials_rounded)
    expected.check(y, what)


def check_input_gradient(
    dx: Tensor,
    dy_parts: Sequence[Operand],
    w_parts: Sequence[Tensor],
    *,
    dim: int = 0,
    start: int = 0,
    partials_rounded: bool = True,
    what: str = "input gradient",
) -> None:
    """dx: the whole gradient, or the shard that begins at `start` along `dim`."""
    whole = expected_input_gradient(dy_parts, w_parts, dtype=dx.dtype, partials_rounded=partials_rounded)
    whole.narrow(dim, start, dx.shape[dim]).check(dx, what)


def check_weight_gradient(dw: Tensor, dy: Operand, x: Operand, *, what: str = "weight gradient") -> None:
    expected_weight_gradient(dy, x, dtype=dw.dtype).check(dw, what)


def check_bias_gradient(db: Tensor, dy: Operand, *, what: str = "bias gradient") -> None:
    expected_bias_gradient(dy, dtype=db.dtype).check(db, what)
