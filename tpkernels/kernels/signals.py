# mypy: disable-error-code="untyped-decorator"
"""Waiting for a chunk and announcing one, inside a Triton kernel.

A *signal* is an int32 that holds the epoch of the last call whose chunk is complete. It has one writer per epoch, only
ever grows, and wraps; it is never reset. The epoch of the running call is read from device memory, never passed by
value, so that a captured graph replays with fresh epochs.

Memory ordering. Writer: its threads store the data, `bar.sync` orders them before the one thread that then stores the
epoch with release semantics at system scope. Reader: one thread reads the signal with acquire semantics at system
scope, the value is handed to the other threads through a barrier, and all of them may then read the data. Triton emits
no barrier before a release by itself (3.6, 3.7); a lint of the generated PTX holds both sides to this, see
tests/kernels/ptx_lint.py. Readers that use tensor descriptors call `order_descriptor_loads` after the wait: the
acquire orders ordinary loads, while descriptor loads go through the asynchronous proxy.

A wait is bounded. It gives up after `timeout`, writes one error record (the first CTA to claim it wins) and returns 0;
the caller then skips its work and every later wait, and CTAs that still poll see the record and give up as well. The
kernel ends, nothing traps, and the host finds the record. It may lie in mapped host memory, or in device memory.
Only CTAs of one launch compete for a record.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = [
    "OP_ALL_GATHER_MATMUL",
    "RECORD_FIELDS",
    "RECORD_WRITTEN",
    "announce",
    "count_tile",
    "order_descriptor_loads",
    "signal",
    "wait_at_least",
]

# The interpreter has no clock, no inline assembly, and rounds bf16 differently; kernels ask here.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# An error record is these int64 values. `state`: 0 none, 1 being written, 2 written. `rank` waited for chunk `chunk` of
# `peer` to reach `expected`, and found `got`; signals are signed here, modulo 2^32.
RECORD_FIELDS = ("state", "rank", "op", "epoch", "chunk", "expected", "got", "peer")
RECORD_WRITTEN = 2
OP_ALL_GATHER_MATMUL = tl.constexpr(1)

# Polls between two looks at the clock and at the record, which may be a microsecond of PCIe away.
_POLLS_PER_LOOK = tl.constexpr(1 if INTERPRETED.value else 256)


@triton.jit
def signal(counter):  # type: ignore[no-untyped-def]
    """Add one to `counter`: all that this CTA has written before is visible to who acquires the new value."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def announce(counter, epoch):  # type: ignore[no-untyped-def]
    """Set `counter` to `epoch`, visible like `signal`. For signals that not every call uses (chunk counts differ)."""
    tl.debug_barrier()
    tl.atomic_xchg(counter, epoch, sem="release", scope="sys")


@triton.jit
def count_tile(counter, num_tiles):  # type: ignore[no-untyped-def]
    """Count this CTA's finished tile; 1 for the last of `num_tiles`, which then has acquired all others' writes.

    `counter` is 0 before and after a call: the last one leaves it so, and launches of a rank follow each other.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = (before + 1 == num_tiles).to(tl.int32)
    if last != 0:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def order_descriptor_loads():  # type: ignore[no-untyped-def]
    """Order what was acquired before the descriptor (TMA) loads after: acquire alone covers the generic proxy only."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_at_least(counter, epoch, record, rank, op, chunk, peer, timeout):  # type: ignore[no-untyped-def]
    """Wait until `counter` has reached `epoch`; 1 if it has, 0 if the wait was given up.

    timeout: nanoseconds; the interpreter counts polls. `counter - epoch` is int32 and wraps, so its sign is right while
    the two are less than 2^31 apart.
    """
    arrived = 1
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    if seen - epoch < 0:
        start = _now()
        polls = 0
        while (seen - epoch < 0) & (arrived != 0):
            polls += 1
            if polls % _POLLS_PER_LOOK == 0:
                spent = polls.to(tl.int64) if INTERPRETED else _now() - start
                if spent > timeout:
                    _write_record(record, rank, op, epoch, chunk, seen, peer)
                    arrived = 0
                elif tl.load(record, volatile=True) != 0:
                    arrived = 0
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    return arrived


@triton.jit
def _now():  # type: ignore[no-untyped-def]
    return tl.full((), 0, tl.int64) if INTERPRETED else globaltimer()


@triton.jit
def _write_record(record, rank, op, epoch, chunk, seen, peer):  # type: ignore[no-untyped-def]
    zero = tl.full((), 0, tl.int64)
    if tl.atomic_cas(record, zero, zero + 1, sem="acq_rel", scope="sys") == 0:
        tl.store(record + 1, zero + rank)
        tl.store(record + 2, zero + op)
        tl.store(record + 3, zero + epoch)
        tl.store(record + 4, zero + chunk)
        tl.store(record + 5, zero + epoch)
        tl.store(record + 6, zero + seen)
        tl.store(record + 7, zero + peer)
        tl.debug_barrier()
        tl.atomic_xchg(record, zero + 2, sem="release", scope="sys")
