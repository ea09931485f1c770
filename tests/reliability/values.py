"""Numbers: random problems within the fp64 bound (R11), NaN and Inf where they belong (R12), equal bits whoever comes
first (R13)."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import new_group, own_part, run_and_check
from tests.reliability.calls import SHARED
from tests.reliability.crew import Link, together
from tests.reliability.outcome import Outcome
from tpkernels.testing.cases import COLLECTIVES, Case, call, operands
from tpkernels.testing.payload import payload
from tpkernels.testing.references import check_values

FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACTIVATIONS = (None, None, "relu", "gelu", "gelu_tanh", "silu")
CALLS_PER_SHAPE = 3
SHAPES_PER_GROUP = 400


# ---------------------------------------------------------------- R11


def random_case(dice: random.Random, size: int) -> Case:
    """Any op, dtype, rank of x, dim, cut (uneven, empty, all empty), bias, activation, strides, number of weights."""
    op = dice.choice(FUSED)
    k = dice.choice((1, 3, 8, 17, 32, 65))
    leading = [dice.choice((0, 1, 2, 5, 13, 32, 70))]
    if dice.random() < 0.3:
        leading.append(dice.choice((1, 2, 5)))
    shape = (*leading, k)
    n = dice.choice((1, 4, 6, 19, 48))
    gather = op == "all_gather_matmul"
    dim = 0 if op == "matmul_all_reduce" else dice.randrange(len(shape))
    cut_size = shape[dim] if gather or dim < len(shape) - 1 else n
    sizes = _cut(dice, cut_size, size) if op != "matmul_all_reduce" and dice.random() < 0.7 else None
    return Case(
        op,
        shape,
        ns=(n, 5) if gather and dice.random() < 0.3 else (n,),
        dim=dim,
        sizes=sizes if sizes is not None or not gather or cut_size % size == 0 else _cut(dice, cut_size, size),
        k_sizes=None if gather else _cut(dice, k, size),
        dtype=dice.choice(DTYPES),
        bias=dice.random() < 0.5,
        activation=dice.choice(ACTIVATIONS) if gather else None,
        implementation=SHARED,
        return_gathered=gather and dice.random() < 0.3,
        strided=dice.random() < 0.4,
        own_ns=gather and dice.random() < 0.2,
    )


def _cut(dice: random.Random, total: int, parts: int) -> tuple[int, ...]:
    marks = sorted(dice.randrange(total + 1) for _ in range(parts - 1))
    return tuple(stop - start for start, stop in zip([0, *marks], [*marks, total], strict=True))


def random_problems(count: int, sizes: tuple[int, ...] = (2, 3, 4), implementation: str = SHARED) -> Outcome:
    """R11: every element of every output within the fp64 bound; collectives exact."""
    outcome = Outcome(f"R11 {implementation}")
    for size in sizes:
        share = count // len(sizes) + (size == sizes[0]) * (count % len(sizes))
        for rank, (made, problems) in enumerate(
            together(size, _random, share, implementation, within=120.0 + 0.1 * share)
        ):
            for problem in problems:
                outcome.add("out of bounds, or raised", f"world {size}, rank {rank}: {problem}")
            if rank == 0:
                outcome.add(None, times=made)
    return outcome


def _random(link: Link, count: int, implementation: str) -> tuple[int, list[str]]:
    dice = random.Random(11)
    made, problems = 0, []
    while made < count and len(problems) < 20:
        with new_group() as group:
            for _ in range(SHAPES_PER_GROUP):
                case = random_case(dice, link.size).but(implementation=implementation)
                for _ in range(CALLS_PER_SHAPE):
                    try:
                        if dice.random() < 0.25:
                            _check_collectives(link, group, case.but(call=made))
                        else:
                            run_and_check(case.but(call=made), group)
                    except AssertionError as error:
                        problems.append(str(error)[:600])
                    made += 1
                if made >= count:
                    break
    return made, problems


def _check_collectives(link: Link, group: Any, case: Case) -> None:
    """The three collectives on x of the case's shape, bit for bit: copies, and sums in rank order, rounded once."""
    cut = _cut(random.Random(case.call), case.shape[case.axis], link.size)
    plain = case.but(sizes=cut, activation=None, return_gathered=False, strided=False)
    if case.implementation == "chunked":  # nothing to overlap with
        plain = plain.but(implementation="unfused")
    for op in COLLECTIVES:
        run_and_check(plain.but(op=op), group)


# ---------------------------------------------------------------- R12


def nonfinite(count: int, size: int = 2, implementation: str = SHARED) -> Outcome:
    """R12: NaN, Inf and -Inf in x and weights reach exactly the elements that the reference says."""
    outcome = Outcome(f"R12 {implementation}")
    for rank, (made, problems) in enumerate(
        together(size, _nonfinite, count, implementation, within=120.0 + 0.2 * count)
    ):
        for problem in problems:
            outcome.add("another mask, or raised", f"rank {rank}: {problem}")
        if rank == 0:
            outcome.add(None, times=made)
    return outcome


def _nonfinite(link: Link, count: int, implementation: str) -> tuple[int, list[str]]:
    dice = random.Random(12)
    made, problems = 0, []
    while made < count:
        with new_group() as group:
            for _ in range(SHAPES_PER_GROUP):
                case = random_case(dice, link.size).but(call=made, activation=None, implementation=implementation)
                try:
                    _one_nonfinite(link, group, case, dice)
                except AssertionError as error:
                    problems.append(str(error)[:600])
                made += 1
                if made >= count:
                    break
    return made, problems


def _one_nonfinite(link: Link, group: Any, case: Case, dice: random.Random) -> None:
    parts = operands(case, link.size)
    weights = [w for ws in parts.ws for w in ws]
    keeps = not _library_leaks(case.dtype) or all(w.shape[-1] % 2 == 0 for w in weights)
    for tensor in (*parts.xs, *weights):
        if tensor.numel() and dice.random() < 0.6 and keeps:
            index = tuple(dice.randrange(n) for n in tensor.shape)
            tensor[index] = dice.choice((float("nan"), float("inf"), float("-inf")))
    outs, gathered = call(case, own_part(parts, link.rank), group)
    if case.return_gathered:  # NaN has many bit patterns, but a copy keeps them
        whole = torch.cat(parts.xs, case.axis)
        assert gathered is not None and torch.equal(gathered.nan_to_num(7.0), whole.nan_to_num(7.0)), case
        case = case.but(return_gathered=False)
    check_values(case, parts, outs, None, link.rank)


@lru_cache
def _library_leaks(dtype: torch.dtype) -> bool:
    """Whether torch's own GEMM makes NaN where there is none: oneDNN's does, in bf16, where K is odd.

    On a CPU with AMX NaN leaks into the row before, on one without an Inf in the last column turns into NaN.
    """
    draw = torch.Generator().manual_seed(1)
    for rows, k in product((32, 70), (3, 5, 7)):  # which of these, is the CPU's matter
        w = torch.randn(48, k, generator=draw).to(dtype)
        for row, column, value in product(range(1, rows), (0, -1), (torch.nan, torch.inf)):
            x = torch.randn(rows, k, generator=draw).to(dtype)
            x[row, column] = value
            y, exact = F.linear(x, w), F.linear(x.double(), w.double())
            if not torch.equal(y.isnan(), exact.isnan()) or not torch.equal(y.isinf(), exact.isinf()):
                return True
    return False


# ---------------------------------------------------------------- R13


def same_bits(count: int, sizes: tuple[int, ...] = (2, 3), implementation: str = SHARED) -> Outcome:
    """R13: the same call gives the same bits with stragglers in any order, repeated, and with other chunk counts.

    Chunk counts split the library's GEMM, whose fp32 rows may depend on how many there are: those are compared on
    integers, whose sums are exact, and on collectives, which are our own code alone.
    """
    outcome = Outcome(f"R13 {implementation}")
    for size in sizes:
        share = count // len(sizes) + (size == sizes[0]) * (count % len(sizes))
        plans = [(trial, None if trial % 2 else trial // 2 % 5 + 1) for trial in range(share)]
        per_rank = together(size, _bits, plans, implementation, within=120.0 + 1.0 * share)
        first = next((results for (_, chunks), results in zip(plans, per_rank[0], strict=True) if chunks is None), None)
        for (trial, chunks), found in zip(plans, zip(*per_rank, strict=True), strict=True):
            problem = None
            if any(results.exact != per_rank[0][0].exact for results in found):
                problem = "other bits on integers or in collectives"
            elif chunks is None and any(results.ordinary != first.ordinary for results in found):
                problem = "other bits on ordinary data"
            elif not found[0].ranks_agree:
                problem = "ranks got different sums"
            outcome.add(problem, f"world {size}, trial {trial}, chunks {chunks}")
    return outcome


@dataclass(frozen=True)
class Bits:
    """Digests of all ranks' outputs in one trial: of ordinary data, and of what no chunk count may change."""

    ordinary: tuple[str, ...]
    exact: tuple[str, ...]
    ranks_agree: bool


def _bits(link: Link, plans: list[tuple[int, int | None]], implementation: str) -> list[Bits]:
    results = []
    for trial, chunks in plans:
        dice = random.Random(100 * trial + link.rank)
        with new_group(chunks) as group:
            ordinary = [] if chunks is not None else _outputs(link, group, dice, implementation, integers=False)
            exact = _outputs(link, group, dice, implementation, integers=True)
            exact += _collective_outputs(link, group, dice, implementation)
        mine = (_digest(ordinary), _digest(exact), _digest(exact[-1:]))
        everyone: list[Any] = [None] * link.size
        dist.all_gather_object(everyone, mine)
        ordinary_bits, exact_bits, last = zip(*everyone, strict=True)
        results.append(Bits(ordinary_bits, exact_bits, len(set(last)) == 1))
    return results


def _outputs(link: Link, group: Any, dice: random.Random, implementation: str, *, integers: bool) -> list[Tensor]:
    """Every fused op in every dtype, each rank late by a little of its own."""
    outs: list[Tensor] = []
    for dtype in DTYPES:
        for op in FUSED:
            case = Case(
                op, (37, 24), ns=(11,), dtype=dtype, bias=True, implementation=implementation, integers=integers
            )
            if op == "all_gather_matmul":
                case = case.but(sizes=_cut(random.Random(1), 37, link.size))
            parts = operands(case, link.size)
            time.sleep(dice.choice((0.0, 0.0, 0.001, 0.004)))
            outs += call(case, own_part(parts, link.rank), group)[0]
    return outs


def _collective_outputs(link: Link, group: Any, dice: random.Random, implementation: str) -> list[Tensor]:
    """Sums of ordinary data, one shot and in two phases; the last is equal on all ranks."""
    collective = "unfused" if implementation == "chunked" else implementation  # nothing to overlap with
    outs = []
    for dtype in DTYPES:
        for rows in (3, 3000):
            x = payload((rows, 33), dtype, rank=link.rank, name="bits")
            time.sleep(dice.choice((0.0, 0.0, 0.001, 0.004)))
            outs.append(tpk.reduce_scatter(x, group, implementation=collective))
            outs.append(tpk.all_reduce(x, group, implementation=collective))
    return outs


def _digest(tensors: list[Tensor]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
