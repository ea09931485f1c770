# mypy: disable-error-code="untyped-decorator"
"""Waiting for a chunk and announcing one, inside a Triton kernel; the same protocol as csrc/cuda/protocol.h.

A *signal* holds the number (epoch) of the last call whose chunk is complete. It has one writer, only ever grows, wraps,
and is never reset. The running call's epoch is read from device memory, never passed by value, so that a captured graph
replays with fresh ones.

Memory ordering. Writer: the CTA's threads store the data; `bar.sync` orders them before the one thread that then stores
the signal with release semantics at system scope. Reader: one thread reads the signal with acquire semantics at system
scope, its value is handed to the other threads through a barrier, and all of them may then read the data, at places
that `behind` has made depend on the outcome: loops are pipelined, so the loads of a tile start under the arithmetic of
the one before. Triton emits no barrier before a release by itself (3.6, 3.7); a lint of the generated PTX holds both
sides to this, see tests/kernels/ptx_lint.py. Readers that use tensor descriptors call `order_descriptor_loads` after
the wait: acquiring orders ordinary loads, while descriptor loads go through the asynchronous proxy. A signal is stored,
not exchanged: peers behind PCIe, and host memory, need not know atomics.

A wait is bounded. It ends after the group's timeout, when a peer has poisoned the group, or when another CTA or kernel
of this rank has failed. The first to fail writes the failure record in host memory and poisons all ranks; the waiting
kernel waits for nothing and stores nothing any more, and ends. Nothing traps, the context survives, the host finds the
record and raises.

A *group table* is what a kernel knows of its group, int64 values in device memory (`group_table`).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = [
    "FAILURE_FIELDS",
    "announce",
    "behind",
    "count_tile",
    "current_call",
    "group_table",
    "has_failed",
    "order_descriptor_loads",
    "own_rank",
    "wait_at_least",
]

# The interpreter has no clock, no inline assembly, and rounds bf16 differently; kernels ask here.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# The 32-bit words of a failure record (`tpk_failure` in csrc/cuda/launch.h); two words of waited_ns follow. `rank`
# waited for chunk `chunk` of `peer` to reach `expected` in call `epoch`, and found `got`.
FAILURE_FIELDS = ("state", "kind", "rank", "op", "peer", "chunk", "epoch", "expected", "got", "fingerprint")
_TIMEOUT = tl.constexpr(1)
_POISONED = tl.constexpr(2)

# Places in a group table, and in the state (int32 words, `State` in csrc/cuda/protocol.h) that it leads to.
_STATE, _FAILURE, _TIMEOUT_NS, _RANK, _WORLD_SIZE, _PADS = (tl.constexpr(place) for place in range(6))
_FAILED = tl.constexpr(2)

# Polls between two looks at the clock, at failures of this rank's other CTAs and at poison.
_POLLS_PER_LOOK = tl.constexpr(1 if INTERPRETED.value else 16)


def group_table(*, state: int, failure: int, timeout_ns: int, rank: int, pads: Sequence[int]) -> list[int]:
    """Values of a group table, from device addresses of the state, of the failure record and of every rank's pad.

    The interpreter counts polls instead of nanoseconds.
    """
    return [state, failure, timeout_ns, rank, len(pads), *pads]


@triton.jit
def current_call(group, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The running call: its epoch as int32, or with its fingerprint above the epoch as int64."""
    return tl.load(tl.load(group + _STATE).to(tl.pointer_type(dtype)))


@triton.jit
def own_rank(group):  # type: ignore[no-untyped-def]
    return tl.load(group + _RANK).to(tl.int32)


@triton.jit
def has_failed(group):  # type: ignore[no-untyped-def]
    """Whether a wait of this rank has failed; then there is nothing left to compute."""
    return tl.load(tl.load(group + _STATE).to(tl.pointer_type(tl.int32)) + _FAILED, volatile=True) != 0


@triton.jit
def announce(signal, value):  # type: ignore[no-untyped-def]
    """Store `value`: all that this CTA has written, or acquired before, is visible to who then acquires it."""
    _barrier()
    _store_release(signal, value)


@triton.jit
def count_tile(counter, num_tiles):  # type: ignore[no-untyped-def]
    """Count this CTA's finished tile; true for the last of `num_tiles`, which has then acquired all others' writes.

    `counter` is 0 before and after a call: the last one leaves it so, and launches of a rank follow each other.
    """
    _barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1 == num_tiles
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def order_descriptor_loads():  # type: ignore[no-untyped-def]
    """Order what was acquired before the descriptor (TMA) loads after: acquiring covers the generic proxy only."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def behind(arrived, value):  # type: ignore[no-untyped-def]
    """`value` (int32), which now depends on the outcome of a wait: nothing made of it can be loaded before.

    Without it the program's order is all that keeps a load behind a wait, and a compiler that pipelines a loop moves
    loads forward past everything that they do not depend on.
    """
    if INTERPRETED:
        return value
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1; // behind $2", "=r,r,r", [value, arrived], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def wait_at_least(signal, epoch, group, op, peer, chunk):  # type: ignore[no-untyped-def]
    """Wait until an int32 signal has reached `epoch`; 1 if it has, 0 if the wait has failed.

    `signal - epoch` is int32 and wraps, so its sign is right while the two are less than 2^31 apart.
    """
    arrived = 1
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    if seen - epoch < 0:
        timeout = tl.load(group + _TIMEOUT_NS)
        pad = tl.load(group + _PADS + tl.load(group + _RANK)).to(tl.pointer_type(tl.int64))
        start = _now()
        polls = 0
        while (seen - epoch < 0) & (arrived != 0):
            polls += 1
            if polls % _POLLS_PER_LOOK == 0:
                spent = start + polls if INTERPRETED else _now() - start
                poison = tl.load(pad, volatile=True)
                if has_failed(group):
                    arrived = 0
                elif (poison != 0) | (spent >= timeout):
                    kind = tl.where(poison != 0, _POISONED, _TIMEOUT)
                    blamed = tl.where(poison != 0, poison.to(tl.int32) - 1, peer)
                    _fail(group, kind, op, blamed, chunk, epoch, seen, spent)
                    arrived = 0
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    return arrived


@triton.jit
def _fail(group, kind, op, peer, chunk, epoch, seen, spent):  # type: ignore[no-untyped-def]
    """Keep the first failure of this rank, and tell all ranks. The claim is in device memory, which has atomics."""
    zero = tl.full((), 0, tl.int32)
    failed = tl.load(group + _STATE).to(tl.pointer_type(tl.int32)) + _FAILED
    if tl.atomic_cas(failed, zero, zero + 1, sem="acq_rel", scope="gpu") == 0:
        record = tl.load(group + _FAILURE).to(tl.pointer_type(tl.int32))
        rank = own_rank(group)
        tl.store(record + 1, kind)
        tl.store(record + 2, rank)
        tl.store(record + 3, op)
        tl.store(record + 4, peer)
        tl.store(record + 5, chunk)
        tl.store(record + 6, epoch)
        tl.store(record + 7, epoch)
        tl.store(record + 8, seen)
        tl.store(record + 9, 0)
        tl.store((record + 10).to(tl.pointer_type(tl.int64)), spent)
        _barrier()
        _store_release(record, zero + 1)
        for other in tl.range(0, tl.load(group + _WORLD_SIZE).to(tl.int32)):
            pad = tl.load(group + _PADS + other).to(tl.pointer_type(tl.int64))
            _store_release(pad, (rank + 1).to(tl.int64))


@triton.jit
def _barrier():  # type: ignore[no-untyped-def]
    """All threads of this CTA, which therefore cannot be specialised by warps.

    Not tl.debug_barrier: a loop in which that stands is not pipelined (Triton 3.7). And not bar.sync, which the threads
    of a warp must execute at one place: the compiler may copy inline assembly to the ends of two branches.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise("barrier.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _store_release(place, value):  # type: ignore[no-untyped-def]
    """One thread stores; the caller has put a barrier before. Triton has no store with an order of its own."""
    if INTERPRETED:
        tl.atomic_xchg(place, value, sem="release", scope="sys")
    elif value.dtype == tl.int64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l", [place, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [place, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _now():  # type: ignore[no-untyped-def]
    return tl.full((), 0, tl.int64) if INTERPRETED else globaltimer()
