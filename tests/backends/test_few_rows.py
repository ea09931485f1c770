"""GEMMs of few rows by the compiled kernel: when it is taken, and that nothing else shows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.backends.test_repeated_calls import agree, operands
from tests.nn.reference import tp_mesh
from tests.ops.support import new_group
from tpkernels.comm.groups import resolve
from tpkernels.gemm import few_rows, widened
from tpkernels.gemm.native import native, why_not
from tpkernels.nn import ColumnParallelLinear, ColumnParallelLinears
from tpkernels.testing.numeric import Bounded, assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(native() is None, reason=why_not() or "the compiled core is there"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEADS = ((1,), (2, 1, 3), (32,), (33,))


@contextmanager
def measured_as(compiled_us: float = 1.0, torch_us: float = 9.0) -> Iterator[list[tuple[int, ...]]]:
    """Sizes count however small, the measurement is this, and what comes out is the products that the kernel made.

    The other GEMM is torch's, in bf16, too.
    """
    made: list[tuple[int, ...]] = []
    compiled = few_rows._run

    def noted(*operands: Any) -> None:
        compiled(*operands)
        made.append(operands[-3:])

    times = few_rows.Times(compiled_us, torch_us)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(few_rows, "_LEAST_WEIGHT_BYTES", 1))
        stack.enter_context(mock.patch.object(few_rows, "measured", lambda *_: times))
        stack.enter_context(mock.patch.object(few_rows, "_run", noted))
        stack.enter_context(mock.patch.object(widened, "told", lambda *_: None))
        widened._own_rows.cache_clear()
        stack.callback(widened._own_rows.cache_clear)
        few_rows._linear_wins.cache_clear()
        stack.callback(few_rows._linear_wins.cache_clear)
        yield made


def multiplies(group: dist.ProcessGroup) -> list[bool]:
    """Of the calls that the group can repeat: whether the kernel makes their products."""
    repetitions = [checked.repetition for checked in resolve(group).checked.values()]
    return [repetition.multiply is not None for repetition in repetitions if repetition is not None]


# ---------------------------------------------------------------- matmul_all_reduce


def sum_of_products(x: Tensor, w: Tensor, group: dist.ProcessGroup, bias: Tensor | None = None) -> Tensor:
    return tpk.matmul_all_reduce(x, w, group, bias=bias, implementation="shared_memory")


def every_kind_three_times() -> int:
    with new_group(calibrate=True) as group, measured_as() as made:
        for dtype in DTYPES:
            for lead in LEADS:
                for with_bias in (False, True):
                    for call in range(3):
                        x, w, bias, exact = operands(call, *lead, dtype=dtype)
                        y = sum_of_products(x, w, group, bias if with_bias else None)
                        agree(y, exact + with_bias * bias.double(), x, f"{dtype} {lead} {with_bias} {call}")
                real = payload((*lead, 1200), dtype, rank=group.rank()), payload((10, 1200), dtype, rank=group.rank())
                first, *later = (sum_of_products(*real, group) for _ in range(3))
                for y in later:
                    assert_bitwise_equal(y, first, f"real numbers, once and again, {dtype} {lead}")
                parts = [[payload(shape, dtype, rank=r) for r in (0, 1)] for shape in ((*lead, 1200), (10, 1200))]
                flat = [x.reshape(-1, 1200) for x in parts[0]]
                bound = Bounded.sum_of_products(flat, parts[1], dtype=dtype, partials_rounded=True).rounded(dtype)
                bound.check(first.reshape(-1, 10), f"{dtype} {lead}")
        x, w, _, exact = operands(0, 1, dtype=torch.float64)
        for _ in range(2):
            agree(sum_of_products(x, w, group), exact, x, "fp64, which has no kernel")
        few = [lead != (33,) for _ in DTYPES for lead in LEADS for _ in range(3)]
        assert multiplies(group) == [*few, False]
        assert resolve(group).in_flight is None
        return len(made)


def test_values_are_right_and_a_repeated_call_equals_the_first(ranks: Pools) -> None:
    """The kernel is asked by name in first calls only; repeated ones are one native step."""
    assert ranks(2).run(every_kind_three_times) == [3 * 3 * 3] * 2


def who_wins() -> list[Any]:
    chosen = []
    slower = {"compiled_us": 9.0, "torch_us": 9.0}
    for times, calibrates in (
        ({}, True),
        (slower, True),
        (slower if dist.get_rank() == 1 else {}, True),
        ({}, False),
    ):
        with new_group(calibrate=calibrates) as group, measured_as(**times) as made:
            x, w, _, exact = operands(0, 4)
            for _ in range(2):
                agree(sum_of_products(x, w, group), exact, x, "whoever wins")
            how = str(tpk.explain("matmul_all_reduce", m=4, n=10, k=24, dtype=x.dtype, group=group))
            chosen.append((multiplies(group), len(made), "few rows" in how and "if every rank measures it" in how))
    return chosen


def test_the_kernel_is_taken_where_it_was_faster_on_every_rank_and_never_unmeasured(ranks: Pools) -> None:
    taken, never = ([True], 1, True), ([False], 0, False)
    only_explained = ([False], 0, True)  # measured at the first call, and slower on a rank
    for rank, chosen in enumerate(ranks(2).run(who_wins)):
        assert chosen == [taken, only_explained, only_explained, never], f"rank {rank}"


def other_strides() -> list[int]:
    with new_group(calibrate=True) as group, measured_as() as made:
        x, w, bias, exact = operands(0, 4)
        for weight in (w, w, w.t().contiguous().t(), torch.cat([w, w], 1)[:, : w.shape[1]]):
            y = sum_of_products(x, weight, group, bias)
            agree(y, exact + bias.double(), x, f"strides {weight.stride()}")
        wrong = w.double()
        with pytest.raises(ValueError, match="weight must have the dtype of x"):
            sum_of_products(x, wrong, group, bias)
        agree(sum_of_products(x, w, group, bias), exact + bias.double(), x, "after a refusal")
        return [len(made), resolve(group).calls]


def test_a_weight_by_columns_goes_to_torch_and_one_with_gaps_does_not(ranks: Pools) -> None:
    (made, calls), other = ranks(2).run(other_strides)
    assert made == 1 and other == [made, calls]


def a_rank_is_late() -> float:
    with new_group(calibrate=True) as group, measured_as():
        x, w, bias, exact = operands(0, 4)
        for call in range(3):
            if group.rank() == 1 and call == 2:
                time.sleep(0.7)
            start = time.monotonic()
            agree(sum_of_products(x, w, group, bias), exact + bias.double(), x, f"call {call}")
        return time.monotonic() - start


def test_a_late_rank_is_waited_for(ranks: Pools) -> None:
    assert ranks(2).run(a_rank_is_late)[0] > 0.5


# ---------------------------------------------------------------- the local product of column layers


def column_layers() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    linear, other = nn.Linear(40, 22), nn.Linear(40, 22)
    for parameter in (*linear.parameters(), *other.parameters()):
        dist.broadcast(parameter.data, 0)
    layer = ColumnParallelLinear.from_linear(linear, tp_mesh(), activation="relu")
    both = ColumnParallelLinears.from_linears({"a": linear, "b": other}, tp_mesh())
    unfused = ColumnParallelLinear.from_linear(linear, tp_mesh(), activation="relu", implementation="unfused")
    w, b = layer.weight.to_local(), layer.bias.to_local()
    bound = Bounded.sum_of_products([x], [w.detach()], bias=b.detach(), dtype=x.dtype)
    with mock.patch.dict(os.environ, TPKERNELS_CALIBRATE="1"), measured_as() as made:
        with torch.no_grad():
            assert_bitwise_equal(layer(x), tpk.ops.copy_matmul(x, w, tp_mesh(), bias=b, activation="relu"), "the op")
            assert len(made) == 2
            bound.activation("relu", dtype=x.dtype).rounded(x.dtype).check(layer(x), "a column layer")
            bound.rounded(x.dtype).check(both(x)[0], "one of two layers")
            assert_bitwise_equal(both(x[None])[0][0], both(x)[0], "more dimensions")
            del made[:]
            assert_bitwise_equal(unfused(x), F.relu(F.linear(x, w, b)), "unfused is torch's")
            tpk.ops.copy_matmul(x, w, tp_mesh(), bias=b, implementation="unfused")
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(x).dtype == torch.bfloat16
            layer(x.repeat(11, 1))
        layer(x)
        leaf = x.clone().requires_grad_()
        layer(leaf).sum().backward()
        assert leaf.grad is not None and not made, "with gradients, under autocast, with more rows: torch's GEMM"
    with mock.patch.dict(os.environ, TPKERNELS_CALIBRATE="1"), measured_as(9.0, 9.0) as made, torch.no_grad():
        layer(x)
        assert not made


def test_a_column_layer_takes_the_kernel_in_plain_inference_alone(ranks: Pools) -> None:
    ranks(2).run(column_layers)


# ---------------------------------------------------------------- the measurement


@pytest.mark.cpu
def test_a_measurement_is_made_once_for_neighbouring_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPKERNELS_CALIBRATE", "1")
    few_rows.measured.cache_clear()
    dtype = torch.float32
    assert few_rows.serves(3, 600, 500, dtype)
    answers = {few_rows.wins(3, 600, 500, dtype), few_rows.wins(4, 500, 600, dtype)}
    assert few_rows.measured.cache_info().misses == 1 and len(answers) == 1
    few_rows.wins(1, 600, 500, dtype)
    assert few_rows.measured.cache_info().misses == 2
    assert min(few_rows.measured(1, 512, 512, dtype, torch.get_num_threads())) > 0
    for refused in ((0, 600, 500), (33, 600, 500), (1, 100, 100)):
        assert not few_rows.serves(*refused, dtype)
    assert not few_rows.serves(1, 600, 500, torch.float64)
    for refused in ((0, 600, 500), (1000, 600, 500), (40, 100, 100)):
        assert not few_rows.wins_in_blocks(*refused, dtype)
    assert few_rows.measured.cache_info().misses == 2
    few_rows.wins_in_blocks(33, 600, 500, dtype)
    assert few_rows.measured.cache_info().misses == 3, "blocks of an expert's rows are measured as such"
