"""`symmetric` as W processes with an emulated GPU each (emulated.py)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends.contract import BASE, JUDGES, exact_cases, run
from tests.backends.emulated import Emulation, give_up_after
from tests.cuda.test_far import copy_rows
from tests.ops import scaled
from tpkernels.backends.symmetric import copy_engine_traffic, cuda_native
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.comm.groups import resolve
from tpkernels.dispatch import OPS
from tpkernels.ops import agreed_call
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.contract import AllGather
from tpkernels.partition import Layout
from tpkernels.testing.cases import COLLECTIVES, GATHER, REDUCE, SCATTER, Case, operands
from tpkernels.testing.numeric import BoundExceeded, assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PATIENCE_S = 180.0  # of one call on all ranks; alone on two cores the longest takes 10
FORCED: dict[str, Any] = {"implementation": "symmetric"}
EVEN = BASE.but(shape=(12, 24), **FORCED)  # equal shards for 2, 3 and 4 ranks


# --- values -----------------------------------------------------------------------------------------------------------


def case_of(op: str, **changes: Any) -> Case:
    """Of equal shards."""
    return EVEN.but(op=op, **({"bias": False, "ns": ()} if op in COLLECTIVES else {}), **changes)


def judge_all(emulation: Emulation, cases: Sequence[Case], judge: str) -> int:
    with emulation.group() as group:
        for case in cases:
            JUDGES[judge](case, group)
    return len(cases)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.slow("11 s: every op in the interpreter, on ranks; tests/kernels interprets the kernels")
def test_integers_are_exact_and_have_the_bits_of_unfused(
    pools: Pools, emulation: Emulation, world: int, full: bool
) -> None:
    """Every op, dtype, dim and cut; empty shards and missing rows; through the fused kernels and in two steps."""
    settings = replace(emulation, num_chunks=2, most_lanes=2 if world == 4 else 4, multicast=world == 3)
    for op in OPS:
        cases = [case for case in exact_cases(op, "symmetric", world) if case.dtype in DTYPES]
        if op not in COLLECTIVES and not full:  # interpreted: a sample, of other cases for each world
            cases = cases[world % 3 :: {2: 64, 3: 48, 4: 96}[world]]
        pools(world).run(judge_all, settings, cases, "unfused", timeout=PATIENCE_S)


@pytest.mark.full("four interpreted ranks")
def test_peers_that_share_what_they_are_told_get_the_same_bits(pools: Pools, emulation: Emulation) -> None:
    """A shard of one small piece: side streams of several peers, one flag or signal for all of them."""
    settings = replace(emulation, num_chunks=1, most_lanes=1)
    for op in OPS:
        cases = [case for case in exact_cases(op, "symmetric", 4) if case.dtype in DTYPES]
        cases = cases[:: 60 if op in COLLECTIVES else 150]
        pools(4).run(judge_all, settings, cases, "unfused", timeout=PATIENCE_S)
    # Copies that come later than a GEMM needs for this rank's own rows: who is told too early computes with none.
    gather = exact_cases(GATHER, "symmetric", 4)[0]
    late = [gather.but(call=100 + number) for number in range(4)]
    pools(4).run(judge_all, replace(settings, late_us=150_000), late, "unfused", timeout=PATIENCE_S)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_real_numbers_are_within_the_bound_of_fp64(pools: Pools, emulation: Emulation, world: int, full: bool) -> None:
    base = BASE.but(integers=False, **FORCED)
    cases = [
        base.but(op=op, dtype=dtype, shape=shape, dim=len(shape) - 2)
        for op in (GATHER, SCATTER, REDUCE)
        for dtype in DTYPES
        for shape in ((44, 96), (2, 24, 96))
    ]
    cases = [case.but(sizes=None) if case.op != GATHER else case for case in cases]
    gathers = [case for case in cases if case.op == GATHER and case.dtype == torch.bfloat16]
    cases += [gathers[0].but(activation=name, call=1) for name in ("relu", "gelu", "gelu_tanh", "silu")]
    cases += [gathers[0].but(activation=name, ns=(18, 18), call=2) for name in ("swiglu", "geglu")]
    cases.append(gathers[1].but(activation="swiglu", ns=(18, 18), bias=(False, True), dtype=torch.float16))
    cases += [gathers[1].but(ns=(70, 3), bias=(True, False), activation="silu", return_gathered=True, own_ns=True)]
    cases = [case.but(sizes=None if case.shape[case.axis] % world == 0 else uneven(case, world)) for case in cases]
    if not full:  # of the two shapes, of the activations: each with one number of ranks
        cases = cases[world % 2 :: 8]
    settings = replace(emulation, late_us=500, capability=90, multicast=world == 2)  # and descriptors, where they fit
    pools(world).run(judge_all, settings, cases, "values", timeout=PATIENCE_S)
    # Few rows: a gather and a library GEMM, a library GEMM and a reduction; small tensors in one step.
    apart = replace(settings, fuse_from_rows=10**6, one_shot_bytes=10**6)
    pools(world).run(judge_all, apart, cases, "values", timeout=PATIENCE_S)


def judge_scaled(emulation: Emulation, cases: Sequence[scaled.ScaledCase], fault: str | None = None) -> str:
    """What the judge of fp8 calls says."""
    owner, attribute, make = scaled.FAULTS[fault or "one scale for all rows"]
    change = {} if fault is None else {attribute: make(getattr(owner, attribute))}
    with emulation.group() as group, mock.patch.multiple(owner, **change) if change else mock.patch.dict({}):
        try:
            scaled.judge_cases(cases, group)
        except BoundExceeded as error:
            if fault is None:
                raise
            return str(error)
    return "nothing"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "capability"), [(2, 90), (3, 89)])
@pytest.mark.slow("3 s in the interpreter")
def test_fp8_is_exact_or_within_the_bound_and_brings_its_scales_along(
    pools: Pools, emulation: Emulation, world: int, capability: int, full: bool
) -> None:
    """Through the fused kernels, with tensor descriptors and with pointers; and around a library GEMM on older GPUs."""
    cases = [*scaled.exact_cases("symmetric", world), *scaled.real_cases("symmetric")]
    sample = cases if full else cases[world % 2 :: 3 * world - 1]
    settings = replace(emulation, num_chunks=2, late_us=500, capability=capability)
    pools(world).run(judge_scaled, settings, sample, timeout=PATIENCE_S)
    pools(world).run(judge_scaled, replace(settings, capability=80), sample[::3], timeout=PATIENCE_S)
    gather = scaled.ScaledCase(GATHER, (6 * world, 32), ns=(10,), implementation="symmetric")
    for fault in scaled.FAULTS if full or world == 2 else ():
        assert "nothing" not in pools(world).run(judge_scaled, settings, [gather], fault)[-1], fault


def uneven(case: Case, world: int) -> tuple[int, ...]:
    return (case.shape[case.axis] - 5 * (world - 1), *[5] * (world - 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("judge", ["poison", "ownership"])
@pytest.mark.slow("3 s in the interpreter")
def test_nothing_of_an_earlier_call_is_left_and_outputs_are_the_callers(
    pools: Pools, emulation: Emulation, judge: str, full: bool
) -> None:
    cases = []
    for number, op in enumerate(OPS):
        for shape, ns in (((12, 24), (10,)), ((60, 16), (18,))) if full else (((60, 16), (18,)),):
            case = BASE.but(op=op, shape=shape, ns=ns, call=10 * number, return_gathered=op == GATHER, **FORCED)
            cases.append(case.but(bias=False, ns=()) if op in COLLECTIVES else case)
    one_shot_bytes = 10**6 if judge == "poison" else 0
    pools(2).run(
        judge_all, replace(emulation, num_chunks=2, one_shot_bytes=one_shot_bytes), cases, judge, timeout=PATIENCE_S
    )


def results(emulation: Emulation, calls: int, naps: bool) -> list[torch.Tensor]:
    """Calls of growing size, whose slots alternate; now and then a rank is late."""
    outs = []
    with emulation.group() as group:
        rank = dist.get_rank(group)
        for number in range(calls):
            if naps and (number + rank) % 3 == 0:
                time.sleep(0.02)
            rows = 20 + 14 * number
            x = payload((rows, 24), torch.bfloat16, rank=rank, call=number)
            w = payload((20, 24), torch.bfloat16, rank=rank, call=number, name="w")
            outs.append(tpk.all_gather_matmul(x, w, group, activation="gelu", **FORCED))
            outs.append(tpk.matmul_reduce_scatter(x, w, group, **FORCED))
            outs.append(tpk.matmul_all_reduce(x, w, group, **FORCED))
    return outs


@pytest.mark.full(
    "interpreted ranks; tests/kernels/test_interpreted.py has the bits of chunks that come late and shuffled"
)
def test_results_depend_neither_on_chunks_nor_on_who_is_late_nor_on_multicast_nor_on_who_raises_flags(
    pools: Pools, emulation: Emulation, full: bool
) -> None:
    settings, calls = replace(emulation, num_chunks=1), 3 if full else 2
    expected = pools(3).run(results, settings, calls, False, timeout=PATIENCE_S)
    others = ((3, 0, False, True), (2, 4000, True, False)) if full else ((3, 4000, True, True),)
    for chunks, late_us, naps, multicast in others:
        other = replace(settings, num_chunks=chunks, late_us=late_us, multicast=multicast, stream_writes=multicast)
        found = pools(3).run(results, other, calls, naps, timeout=PATIENCE_S)
        for now, before in zip(chain(*found), chain(*expected), strict=True):
            assert_bitwise_equal(now, before)


@pytest.mark.parametrize("strides", [(2**30 + 8, 24), (32, 2**29)], ids=["target", "source"])
def test_copy_engines_move_rows_that_are_two_gib_apart(emulation: Emulation, strides: tuple[int, int]) -> None:
    """CUDA's copy of rows refuses such a pitch, and so does the emulated one."""
    copy_rows(cuda_native.Library(Path(emulation.library)), strides)


# --- gradients, and two calls at once ---------------------------------------------------------------------------------


@contextmanager
def preferred(op: str) -> Iterator[None]:
    """ "auto" takes `symmetric` for this op."""
    key = (op, "symmetric")
    registry = symmetric.dispatch._registry
    with mock.patch.dict(registry, {key: replace(registry[key], estimate=lambda problem, costs: -1.0)}):
        yield


def gradients(emulation: Emulation) -> int:
    checked = 0
    with emulation.group() as group, preferred("all_gather"):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for save in (False, True):
            found = {}
            for name in ("symmetric", "unfused"):
                x = integers((9 + rank, 8), rank, "x")
                ws = [integers((n, 8), rank, f"w{n}") for n in (12, 5)]
                sizes = [9 + r for r in range(size)]
                ys = tpk.all_gather_matmul(
                    x, ws, group, shard_sizes=sizes, activation="relu", save_gathered=save, implementation=name
                )
                v = integers((7, 12), rank, "v")
                z = tpk.matmul_reduce_scatter(ys[0], v, group, shard_sizes=sizes, implementation=name)
                u = integers((3, 5), rank, "u")
                t = tpk.matmul_all_reduce(ys[1], u, group, implementation=name)
                ((z * (rank + 1)).sum() + t.sum()).backward()
                found[name] = [z.detach(), t.detach(), *(leaf.grad for leaf in (x, *ws, u, v))]
            for now, expected in zip(found["symmetric"], found["unfused"], strict=True):
                assert_bitwise_equal(now, expected, f"rank {rank}", either_zero=True)
                checked += 1
    return checked


def integers(shape: tuple[int, int], rank: int, name: str) -> torch.Tensor:
    return payload(shape, torch.float32, rank=rank, name=name, scale=3.0).round().requires_grad_()


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_those_of_unfused_bit_for_bit(pools: Pools, emulation: Emulation, world: int) -> None:
    assert pools(world).run(gradients, replace(emulation, late_us=500)) == [14] * world


def gather_beside_ops(emulation: Emulation) -> None:
    """Two gathers are started, others call in between; each has its own, whenever it is asked."""
    with emulation.group() as made:
        group, size = resolve(made), dist.get_world_size(made)
        layout = Layout.of((4 * size, 6), 0, [4] * size)
        signature = Signature("all_gather", torch.float32, "cpu", layout, 6, "symmetric")
        shards = [[payload((4, 6), rank=rank, call=call) for rank in range(size)] for call in range(3)]
        pending = []
        for call in range(3):
            x = shards[call][group.rank].clone()
            pending.append(agreed_call.start(group, signature, 0, AllGather(x, layout), x.device))
            JUDGES["values"](EVEN.but(op=SCATTER, call=call), made)
        for call in (1, 0, 2):
            assert_bitwise_equal(pending[call](), torch.cat(shards[call]), f"gather {call}")


def test_a_gather_runs_beside_other_calls_of_its_group(pools: Pools, emulation: Emulation) -> None:
    pools(3).run(gather_beside_ops, replace(emulation, late_us=2000))


def capture(emulation: Emulation) -> list[str]:
    """What is said of calls within a "graph capture", and then a known one."""
    said = []
    with emulation.group() as made:
        channels = channels_of(resolve(made))
        for case in (EVEN, EVEN.but(op=SCATTER), EVEN.but(op=REDUCE)):
            for calls in range(3):
                with mock.patch.object(channels.device, "capturing", return_value=calls > 1):
                    JUDGES["values"](case, made)
        with mock.patch.object(channels.device, "capturing", lambda: True):
            for case in (EVEN.but(shape=(24, 24)), EVEN.but(op="all_reduce", ns=(), bias=False, shape=(3000, 999))):
                try:
                    run(case, operands(case, dist.get_world_size(made)), made)
                except tpk.errors.UnsupportedProblem as error:
                    said.append(str(error))
        JUDGES["values"](EVEN.but(shape=(24, 24)), made)
    return said


def test_a_graph_captures_known_calls_and_refuses_others(pools: Pools, emulation: Emulation) -> None:
    for new, large in pools(2).run(capture, emulation):
        assert "the first call of its kind cannot be captured" in new
        assert "symmetric memory cannot grow" in large and "make this call once before the capture" in large
        assert new.startswith("all_gather_matmul(dtype=") and large.startswith("all_reduce(dtype=")


# --- failures ---------------------------------------------------------------------------------------------------------


def fails(emulation: Emulation, fault: str) -> tuple[str, str, float, str]:
    """(error, its text, seconds, error of a second call) of a call with a fault on rank 1."""
    with emulation.group() as group:
        rank = dist.get_rank(group)
        JUDGES["values"](EVEN, group)
        JUDGES["values"](EVEN.but(op=SCATTER), group)
        give_up_after(group, 2.0)
        with FAULTS[fault]() if rank == 1 else mock.patch.dict({}):
            start = time.monotonic()
            first = error_of(fault, group)
        took, second = time.monotonic() - start, error_of(fault, group)
        return type(first).__name__, str(first), took, type(second).__name__


def error_of(fault: str, group: Any) -> BaseException | None:
    """What three calls raise: each says what happened to the kernels of those before it."""
    case = EVEN.but(op=SCATTER if "chunk" in fault else GATHER)
    try:
        for call in range(3):
            run(case, operands(case.but(call=call), dist.get_world_size(group)), group)
    except tpk.errors.CommunicationError as error:
        return error
    return None


@contextmanager
def forgotten(attribute: str) -> Iterator[None]:
    """Copies of which one field names nobody."""
    original = copy_engine_traffic._chunk

    def changed(number: int, *arguments: Any, **settings: Any) -> cuda_native.Chunk:
        made = original(number, *arguments, **settings)
        if number == 0 or attribute != "signal_peers":
            setattr(made, attribute, 0)
        return made

    with (
        mock.patch.object(copy_engine_traffic, "_chunk", changed),
        mock.patch.object(symmetric.Channel, "remember", anew),
    ):
        yield


@contextmanager
def not_lowered() -> Iterator[None]:
    """Flags stay as the call before has left them, as they would in a replay of stream writes without more."""
    original = symmetric.Channel.planned
    planned = lambda self, op, chunks, num_flags: original(self, op, chunks, 0)  # noqa: E731
    with mock.patch.object(symmetric.Channel, "planned", planned):
        yield


def anew(self: Any, key: Any, make: Any, on_device: bool = True) -> Any:
    return make()


FAULTS: dict[str, Any] = {
    "the signal of the shard is forgotten": lambda: forgotten("signal_peers"),
    "the signal of a chunk is forgotten": lambda: forgotten("signal_peers"),
    "a copy raises no flag": lambda: forgotten("raise_ranks"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow("3 s in the interpreter")
def test_what_never_comes_ends_in_an_error_that_names_rank_and_chunk(
    pools: Pools, emulation: Emulation, fault: str
) -> None:
    told = pools(3).run(fails, replace(emulation, num_chunks=2), fault, timeout=PATIENCE_S)
    blamed = 1 if fault != "a copy raises no flag" else None
    waited = [text for name, text, _, _ in told if name == "CollectiveTimeout"]
    assert waited, told
    for text in waited:
        assert "epoch" in text and "chunk" in text, text
    if blamed is not None:
        assert any(f"for rank {blamed}" in text for text in waited), told
    for name, text, took, second in told:
        assert name in ("CollectiveTimeout", "PeerLost", "GroupPoisoned") and took < 60, (name, text, took)  # 3, alone
        assert second == "GroupPoisoned", second


def wrong_values(emulation: Emulation, attribute: str) -> str:
    """Nobody waits for what it copies, and peers are late: values must show it, or these tests would show nothing."""
    found = "nothing"
    with emulation.group() as group, not_lowered() if attribute == "num_flags" else forgotten(attribute):
        for call in range(8):
            if (call + dist.get_rank(group)) % 2:
                time.sleep(0.2)  # longer than a busy machine keeps the other rank from its core
            try:
                JUDGES["values"](EVEN.but(op=SCATTER if attribute == "wait_ranks" else GATHER, call=call), group)
            except AssertionError as error:
                found = type(error).__name__
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("attribute", ["wait_peers", "wait_ranks", "num_flags"])
def test_a_wait_that_is_left_out_shows_in_the_values(pools: Pools, emulation: Emulation, attribute: str) -> None:
    found = pools(2).run(wrong_values, replace(emulation, num_chunks=2), attribute)
    assert any(name in ("AssertionError", BoundExceeded.__name__) for name in found), found


def dies(emulation: Emulation) -> tuple[str, list[int], float]:
    """Rank 1 is killed; what its peers say, when their kernels have waited for it."""
    with emulation.group() as group:
        case = EVEN.but(op=SCATTER)
        JUDGES["values"](case, group)
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            for _ in range(3):
                run(case, operands(case, 3), group)
        except tpk.errors.CommunicationError as error:
            return type(error).__name__, sorted(error.ranks), time.monotonic() - start
    return "nothing", [], 0.0


def test_a_rank_that_dies_ends_the_waits_of_kernels_long_before_the_timeout(pools: Pools, emulation: Emulation) -> None:
    found = pools(3).run(dies, replace(emulation, timeout=60.0), return_exceptions=True)
    for rank in (0, 2):
        name, blamed, took = found[rank]
        assert (name, blamed) == ("PeerLost", [1]) and took < 30, found[rank]  # 1, alone


def disagree(emulation: Emulation) -> tuple[str, str]:
    """Two calls that all ranks know, and rank 1 makes the other one."""
    with emulation.group() as group:
        cases = EVEN, EVEN.but(op=SCATTER)
        for case in (*cases, *cases):  # both slots are there
            JUDGES["values"](case, group)
        first = cases[dist.get_rank(group) == 1]
        try:
            for _ in range(3):
                run(first, operands(first, dist.get_world_size(group)), group)
        except tpk.errors.CommunicationError as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def test_ranks_in_different_calls_are_told_by_their_fingerprints(pools: Pools, emulation: Emulation) -> None:
    for name, text in pools(2).run(disagree, emulation):
        assert name == "GroupMismatch", (name, text)
        assert "all_gather_matmul(" in text and "matmul_reduce_scatter(" in text, text
