"""The checks of `contract.py` fail when they must: each fault below is seeded on real ranks, and seen.

Faults in the transport strike what rank 1 hands to its peers, once, in the third of three calls: on c10d as a chunk
that rank 0 receives (`tpkernels.testing.faults.corrupt_receives`), in shared memory where rank 1 has written it. Faults
of an implementation (it writes its input, hands out its own buffer, forgets a row) are registered as one for the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.backends.contract import BASE, JUDGES, ops_of, refusals, run_and_judge
from tests.backends.test_contract import every_implementation, few_worlds
from tests.ops.support import new_group
from tpkernels import dispatch
from tpkernels.backends import row_gemms
from tpkernels.backends.point_to_point import unfused
from tpkernels.backends.shared_memory.segments import SharedMemory, SharedSegments
from tpkernels.comm.groups import resolve
from tpkernels.comm.transport import Transfer
from tpkernels.dispatch import Implementation
from tpkernels.gemm.native import native
from tpkernels.ops import fast_path
from tpkernels.ops.contract import AllReduce, Context
from tpkernels.testing.cases import COLLECTIVES, GATHER, Case, operands
from tpkernels.testing.faults import corrupt_receives
from tpkernels.testing.numeric import BoundExceeded
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

FAULTS = ("missing_partial", "stale_chunk", "doubled_bias", "swapped_row", "one_nan")


@dataclass
class Strike:
    """Changes the first piece of an armed call, and remembers the pieces of each call for the next one."""

    fault: str | None
    columns: int
    bias: Tensor | None = None
    armed: bool = False
    count: int = 0
    pieces: list[Tensor] = field(default_factory=list)
    previous: list[Tensor] = field(default_factory=list)

    def begin(self, *, armed: bool) -> None:
        self.armed = armed and self.fault is not None
        self.previous, self.pieces = self.pieces, []

    def hit(self, piece: Tensor) -> None:
        """`piece` is a matrix of rank 1 on its way to the others."""
        if piece.numel() == 0:
            return
        number = len(self.pieces)
        self.pieces.append(piece.clone())
        if not self.armed or (self.fault == "doubled_bias" and self.bias is None):
            return
        self.armed = False
        self.count += 1
        if self.fault == "missing_partial":
            piece.zero_()
        elif self.fault == "stale_chunk":
            piece.copy_(self.previous[number])
        elif self.fault == "swapped_row":
            piece[:2] = piece[:2].flip(0)
        elif self.fault == "one_nan":
            piece[0, 0] = float("nan")
        elif self.fault == "doubled_bias":
            assert self.bias is not None
            piece += self.bias

    def bias_of_gemm(self, bias: Tensor | None) -> Tensor | None:
        """Gathers send no partials: there a bias is doubled in a GEMM."""
        if bias is None or bias.dim() != 1 or not self.armed or self.fault != "doubled_bias":
            return bias
        self.armed = False
        self.count += 1
        return 2 * bias


@contextmanager
def in_c10d(strike: Strike, group: Any) -> Iterator[None]:
    """Chunks that rank 0 receives from rank 1."""

    def corrupt(transfer: Transfer) -> None:
        if transfer.peer == 1 and transfer.tensor.is_floating_point():  # not the cards of ranks that meet
            strike.hit(transfer.tensor)

    if dist.get_rank(group) != 0:
        yield
        return
    with corrupt_receives(corrupt):
        yield


@contextmanager
def in_shared_memory(strike: Strike, group: Any) -> Iterator[None]:
    """What rank 1 puts into its segment for its peers, before they are told: copies, products, and summands."""
    core: Any = native()
    copy_rows, mm, addmm = core.copy_rows, torch.mm, torch.addmm
    all_reduce = SharedSegments.all_reduce

    def own_segment() -> torch.UntypedStorage:
        shared = resolve(group).resources[SharedMemory.name].segments
        assert shared is not None
        return shared.view(shared.rank, (1, 1), torch.uint8).untyped_storage()

    def copied(source: int, stride: int, target: int, *rest: int) -> None:
        copy_rows(source, stride, target, *rest)
        segment, (_, rows, row_bytes) = own_segment(), rest
        start = target - segment.data_ptr()
        if 0 <= start < segment.nbytes():
            staged = torch.empty(0, dtype=torch.uint8).set_(segment)[start : start + rows * row_bytes]
            strike.hit(staged.view(torch.float32).view(-1, strike.columns))

    def multiplied(gemm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, out: Tensor) -> Tensor:
            result = gemm(*args, out=out)
            if out.untyped_storage().data_ptr() == own_segment().data_ptr():
                strike.hit(out)
            return result

        return run

    def summed(self: SharedSegments, fingerprint: int, text: str, x: Tensor, out: Tensor) -> None:
        x = x.clone()
        strike.hit(x)
        all_reduce(self, fingerprint, text, x, out)

    def repeated(x: Tensor, weight: Tensor) -> Tensor:
        product = F.linear(x, weight)
        strike.hit(product.view(-1, weight.shape[0]))
        return product

    if dist.get_rank(group) != 1:
        yield
        return
    with (
        mock.patch.object(core, "copy_rows", copied),
        mock.patch.object(torch, "mm", multiplied(mm)),
        mock.patch.object(torch, "addmm", multiplied(addmm)),
        mock.patch.object(SharedSegments, "all_reduce", summed),
        mock.patch.object(fast_path, "F", SimpleNamespace(linear=repeated)),
    ):
        yield


@contextmanager
def in_gemms(strike: Strike, group: Any) -> Iterator[None]:
    """The GEMMs of rank 0."""
    gemm = row_gemms.gemm

    def changed(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        gemm(x, matrix, out, strike.bias_of_gemm(bias))

    if dist.get_rank(group) != 0:
        yield
        return
    with mock.patch.object(row_gemms, "gemm", changed):
        yield


# An implementation with another transport needs a way to strike in it here.
TRANSPORTS: dict[str, Callable[[Strike, Any], AbstractContextManager[None]]] = {
    "unfused": in_c10d,
    "chunked": in_c10d,
    "shared_memory": in_shared_memory,
}


def three_calls(case: Case, fault: str | None, group: Any) -> tuple[str | None, int]:
    """What the judge says of the third call on this rank, and how often a fault struck there."""
    in_transport = fault != "doubled_bias" or case.op != GATHER
    bias = None if case.op in (GATHER, *COLLECTIVES) else operands(case, dist.get_world_size(group)).bs[0][0]
    strike = Strike(fault, case.shape[-1])
    said = None
    with (TRANSPORTS[case.implementation] if in_transport else in_gemms)(strike, group):
        for call in range(3):
            if bias is not None:
                strike.bias = operands(case.but(call=call), dist.get_world_size(group)).bs[0][0]
            strike.begin(armed=call == 2)
            try:
                run_and_judge(case.but(call=call), group)
            except BoundExceeded as error:
                if call < 2:
                    raise
                said = str(error)
    return said, strike.count


def strike_all(name: str, fault: str | None) -> dict[str, tuple[str | None, int]]:
    """All ops of an implementation, small exact and real, and large: by case."""
    results = {}
    with new_group(2) as group:
        for op in ops_of(name):
            if fault == "doubled_bias" and op in COLLECTIVES:
                continue
            for integers, rows, k, n in ((True, 12, 24, 10), (False, 12, 24, 10), (True, 1200, 64, 80)):
                case = BASE.but(op=op, implementation=name, shape=(rows, k), ns=(n,), integers=integers)
                if op in COLLECTIVES:
                    case = case.but(bias=False, ns=())
                results[f"{op}, {rows} rows, integers={integers}"] = three_calls(case, fault, group)
    return results


@pytest.mark.sample(3)
@every_implementation
@few_worlds
def test_without_a_fault_nothing_is_reported(ranks: Pools, world: int, name: str) -> None:
    for results in ranks(world).run(strike_all, name, None):
        assert set(results.values()) == {(None, 0)}


@pytest.mark.sample(9)
@every_implementation
@few_worlds
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_transport_is_caught(ranks: Pools, world: int, name: str, fault: str) -> None:
    by_rank = ranks(world).run(strike_all, name, fault)
    for what in by_rank[0]:
        reports = [results[what][0] for results in by_rank]
        assert sum(results[what][1] for results in by_rank) == 1, f"{what}: the fault was not seeded once"
        caught = [report for report in reports if report is not None]
        assert caught, f"{what}: {fault} went unnoticed"
        if fault == "one_nan":
            assert "nan" in caught[0]


def test_every_transport_can_be_struck() -> None:
    runnable = [name for name, by_op in refusals().items() if None in by_op.values()]
    assert set(runnable) <= set(TRANSPORTS), "an implementation without seeded faults: its checks are unproved"


_buffer: dict[torch.Size, Tensor] = {}


def correct(context: Context, call: AllReduce) -> Tensor:
    return unfused.all_reduce(context, call)


def writes_its_input(context: Context, call: AllReduce) -> Tensor:
    out = correct(context, call)
    call.x[0, 0] += 1
    return out


def returns_its_input(context: Context, call: AllReduce) -> Tensor:
    """In place: right values, in memory that is the caller's already."""
    return call.x.copy_(correct(context, call))


def returns_its_own_buffer(context: Context, call: AllReduce) -> Tensor:
    out = correct(context, call)
    return _buffer.setdefault(out.shape, torch.empty_like(out)).copy_(out)


def forgets_the_last_row(context: Context, call: AllReduce) -> Tensor:
    out = torch.empty_like(call.x)
    out[:-1] = correct(context, call)[:-1]
    return out


def turns_zeros_negative(context: Context, call: AllReduce) -> Tensor:
    out = correct(context, call)
    return torch.where(out == 0, -0.0, out)


def returns_strides(context: Context, call: AllReduce) -> Tensor:
    return correct(context, call).t().contiguous().t()


# What an implementation does wrong, the judge that sees it, and what it says.
MISTAKES: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "writes its input": (writes_its_input, "values", "an input after the call"),
    "returns its input": (returns_its_input, "ownership", "an output is an input"),
    "returns its own buffer": (returns_its_own_buffer, "ownership", "an output after later calls"),
    "forgets the last row": (forgets_the_last_row, "poison", "actual nan"),
    "returns negative zeros": (turns_zeros_negative, "unfused", "against unfused: "),
    "returns strides": (returns_strides, "values", "strides"),
}


def judge_mistake(made: Callable[..., Tensor], judge: str) -> str | None:
    """What a judge says of an all-reduce with this `run`."""
    key = ("all_reduce", "seeded")
    dispatch._registry[key] = Implementation("seeded", "all_reduce", lambda p: None, lambda p, costs: 1.0, made)
    case = Case("all_reduce", (5, 8), ns=(), implementation="seeded", integers=True)
    try:
        with new_group() as group:
            JUDGES[judge](case, group)
    except AssertionError as error:
        return str(error)
    finally:
        del dispatch._registry[key]
        _buffer.clear()
    return None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_an_implementation_is_caught(ranks: Pools, mistake: str) -> None:
    made, judge, words = MISTAKES[mistake]
    for said in ranks(2).run(judge_mistake, correct, judge):
        assert said is None, "the judge rejects what is right"
    for said in ranks(2).run(judge_mistake, made, judge):
        assert said is not None, f"{mistake}: unnoticed by the judge of {judge}"
        assert words in said
