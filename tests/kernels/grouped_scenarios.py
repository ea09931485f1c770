"""What workers of the interpreter do with the grouped kernel: tokens that come late, sums that are taken early.

As in scenarios.py, on a GPU as well. `Case.rows` are tokens; each has `top_k` rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels.scenarios import MARGIN, Case, Surroundings, _arrive, _run_beside, _watch, as_int32, padded
from tpkernels.gemm import fp8
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.grouped import TokenRows
from tpkernels.partition import chunk_ranges, offsets
from tpkernels.testing import grouped_expected as expected
from tpkernels.testing.fp8_operands import Fp8
from tpkernels.testing.numeric import GATED, assert_bitwise_equal
from tpkernels.testing.payload import payload


@dataclass(frozen=True)
class Experts(Case):
    """`load`: as in tpkernels/testing/grouped.py. addend: of the tokens, and a first product for all rows. dealt: this
    rank has the first two experts, and the tokens of all ranks that have one of them."""

    loop: str = "nested"
    dealt: bool = False
    experts: int = 4
    top_k: int = 2
    load: str = "mixed"

    def rows_by_expert(self, call: int) -> tuple[Tensor, TokenRows]:
        generator = torch.Generator().manual_seed(100 * self.seed + call)
        scores = torch.rand(self.rows, self.experts - (self.load == "few"), generator=generator)
        if self.load == "one":
            scores[:, 1] = 2.0
        experts = scores.topk(self.top_k, 1).indices
        return experts, TokenRows(self.place(experts), self.experts)

    def weights(self, call: int, name: str) -> Tensor:
        w = payload((self.experts, self.n, self.k), self.dtype, call=call, name=name, scale=0.5)
        return self.place(w.transpose(1, 2).contiguous().transpose(1, 2) if self.transposed else w)

    def ranges(self) -> list[list[tuple[int, int]]]:
        """Tokens of every rank's chunks."""
        starts = offsets(self.shards)
        return [
            [(first + start, first + stop) for start, stop in chunk_ranges(size, self.num_chunks)]
            for first, size in zip(starts, self.shards, strict=True)
        ]

    def table(self, rows: TokenRows, direction: str) -> Tensor:
        schedule, ranges = self.module("schedule"), self.ranges()
        bounds = sorted({bound for chunks in ranges for chunk in chunks for bound in chunk})
        places = [[(bounds.index(start), bounds.index(stop)) for start, stop in chunks] for chunks in ranges]
        turns = getattr(schedule, direction)(len(self.shards), self.num_chunks, self.rank)
        table: Tensor = schedule.grouped_table(rows.first_rows(bounds), places, turns, self.config().block_m)
        return self.place(table)


def scales_of(case: Experts, shape: tuple[int, ...], call: int, name: str) -> Tensor:
    return payload(shape, torch.float32, call=call, rank=case.seed, name=f"scale {name}").abs() + 0.5


def gather(case: Experts) -> None:
    """`calls` grouped GEMMs of other routings, whose tokens arrive late and in a shuffled order."""
    kernel, arrivals = case.module("grouped_matmul"), case.module("all_gather_matmul").Arrivals
    around = Surroundings(case)
    before_first = as_int32(case.first_epoch - 1)
    signals = case.place(torch.full((len(case.shards) * case.num_chunks,), before_first, dtype=torch.int32))
    for call in range(case.calls):
        epoch = as_int32(case.first_epoch + call)
        around.begin(epoch)
        experts, rows = case.rows_by_expert(call)
        x = payload((case.rows, case.k), case.dtype, call=call, rank=case.seed, name="x")
        dtype, nothing = case.out_dtype or case.dtype, float("nan")
        settings: dict[str, Any] = {}
        if case.scale == "row":  # a row's scale comes with it; 255 is NaN in both
            of_x = scales_of(case, (case.rows, 1), call, "x")
            sent, nothing = fp8.pack(x, of_x), 255
            whole = case.place(torch.full_like(sent, nothing))
            (arriving,) = fp8.split(whole, (case.k,))
            operand, settings["scale_x"] = arriving.numbers, arriving.scale
            exact = x.double() * of_x.double()
        else:
            sent, exact = x, x
            whole, _ = padded(case.rows, case.k, case.dtype, device=case.device, stride=case.stride)
            operand = whole
        start = offsets(case.shards)[case.rank]
        stop = start + case.shards[case.rank]
        whole[start:stop] = case.place(sent[start:stop])
        names = ("gate", "up") if case.activation in GATED else ("gate",)
        weights = [case.weights(call, name) for name in names]
        given: list[Any] = [w.cpu() for w in weights]
        if case.scale == "row":
            of_w = [scales_of(case, (case.experts, case.n), call, name) for name in names]
            settings |= dict(zip(("scale_weight", "scale_weight_up"), map(case.place, of_w), strict=False))
            given = [Fp8(w, scale.unsqueeze(2)).bounded(case.device) for w, scale in zip(given, of_w, strict=True)]
        biases = [payload((case.experts, case.n), dtype, call=call, name=name) for name in names]
        like_out = partial(padded, rows.count, case.n, dtype, device=case.device, stride=case.stride)
        out, margin = like_out()
        kept = [like_out()[0] for _ in names] if case.preactivation else []
        settings |= dict(zip(("preactivation", "preactivation_up"), kept, strict=False))
        settings |= {"weight_up": weights[1]} if len(names) > 1 else {}
        if case.bias:
            settings |= dict(zip(("bias", "bias_up"), map(case.place, biases), strict=False))
        launch = partial(
            kernel.grouped_matmul, operand, weights[0], out,
            arrivals(case.table(rows, "arrivals"), signals, around.group, 7), case.config(),
            tokens=rows.tokens.to(torch.int32), activation=case.activation, **settings,
        )  # fmt: skip
        arrive = partial(_arrive, case, call, case.place(sent), whole, signals, epoch)
        if case.device != "cpu":  # what loads a kernel while another one spins may wait for it: these have run before
            arrive()
            whole[:start], whole[stop:] = nothing, nothing
            signals.fill_(as_int32(epoch - 1))
        _run_beside(case, launch, threading.Thread(target=arrive))
        assert not around.failure.any(), around.told(case)
        sums = [
            expected.products(exact, w, experts, dtype=torch.float32, bias=bias if case.bias else None)
            for w, bias in zip(given, biases, strict=True)
        ]
        y = sums[0]
        if case.activation in GATED:
            y = y.gated(case.activation, sums[1], dtype=torch.float32, input_rounded=False)
        elif case.activation != "none":
            y = y.activation(case.activation, dtype=torch.float32, input_rounded=False)
        y.rounded(out.dtype).check(out, f"call {call}")
        for z, found in zip(sums, kept, strict=False):
            z.rounded(out.dtype).check(found, f"product of call {call}")
        finite = margin.float().isfinite()
        finite[MARGIN : MARGIN + out.shape[0], : out.shape[1]] = False
        assert not finite.any(), "written outside of the result"


def combine(case: Experts) -> None:
    """`calls` sums over the rows of each token; whoever sees a chunk's flag must find its sums complete."""
    kernel, arrivals = case.module("grouped_matmul"), case.module("all_gather_matmul").Arrivals
    around, world_size = Surroundings(case), len(case.shards)
    flags = case.place(torch.full((world_size, case.num_chunks), as_int32(case.first_epoch - 1), dtype=torch.int32))
    counters = case.place(torch.zeros(world_size * case.num_chunks * (1 + case.n), dtype=torch.int32))
    whole = case
    for call in range(case.calls):
        epoch = as_int32(case.first_epoch + call)
        around.begin(epoch)
        experts, rows = whole.rows_by_expert(call)
        routing_weights = payload(tuple(experts.shape), torch.float32, call=call, name="routing")
        row_weights = rows.of_slots(case.place(routing_weights))
        if case.dealt:
            rows = DealtRows(case.place(experts), (2, case.experts - 2), whole.shards, 0)
            row_weights = rows.of_slots(case.place(routing_weights))
            case = replace(whole, shards=tuple(stop - start for start, stop in rows.sources))
            experts = experts[rows.received.cpu()]
            routing_weights = routing_weights[rows.received.cpu()] * (experts < 2)
        chunks = [
            [owner, start, stop - start, start - offsets(case.shards)[owner]]
            for owner, ranges in enumerate(case.ranges())
            for start, stop in ranges
        ]
        names = ("gate", "up") if case.addend else ("gate",)
        xs = [payload((rows.count, case.k), case.dtype, call=call, name=f"x {name}") for name in names]
        weights = [case.weights(call, name) for name in names]
        width = -(-case.n // 8) * 8 + 8
        addend = payload((case.rows, width), case.dtype, call=call, name="addend") if case.addend else None
        staging = [torch.full((rows_of, width), float("nan")).to(case.dtype) for rows_of in case.shards]
        staging = [case.place(part) for part in staging]
        combination = kernel.Combination(
            staging=case.place(torch.tensor([part.data_ptr() for part in staging])),
            rows_of_tokens=rows.of_tokens().to(torch.int32),
            chunks=case.place(torch.tensor(chunks, dtype=torch.int32)),
            flags=case.place(torch.tensor([flag.data_ptr() for flag in flags.flatten()])),
            counters=counters, staging_dtype=case.dtype, staging_stride=width,
            row_weights=row_weights,
            token_addend=None if addend is None else case.place(addend),
        )  # fmt: skip
        order = arrivals(case.table(rows, "departures"), flags.flatten(), around.group, 7)
        products = padded(rows.count, case.n, case.dtype, device=case.device, stride=case.stride)[0]
        launches = [
            partial(
                kernel.grouped_matmul, case.place(x), w, products, order, case.config(),
                addend=products if place else None, combination=combination if place == len(xs) - 1 else None,
            )
            for place, (x, w) in enumerate(zip(xs, weights, strict=True))
        ]  # fmt: skip
        for launch in launches[:-1]:
            launch()
        seen: dict[tuple[int, int], Tensor] = {}
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(case, flags, epoch, staging, seen, stop))
        _run_beside(case, launches[-1], watcher, stop)
        # Rows of the other ranks' experts, which come behind, count nothing.
        missing = torch.zeros(experts.numel() - rows.count, case.k, dtype=case.dtype)
        sums = expected.reduced(
            [[torch.cat([x, missing]) for x in xs]], [[w.cpu() for w in weights]], experts, routing_weights,
            dtype=case.dtype,
        )  # fmt: skip
        if addend is not None:
            sums = sums.plus(addend[:, : case.n]).rounded(case.dtype)
        for owner, tokens in enumerate(case.shards):
            sums.narrow(0, offsets(case.shards)[owner], tokens).check(staging[owner][:, : case.n], f"owner {owner}")
            assert staging[owner][:, case.n :].isnan().all(), "margin"
            for chunk, (first, last) in enumerate(chunk_ranges(tokens, case.num_chunks)):
                assert (flags[owner, chunk] == epoch) == (last > first), f"flag of {owner}, {chunk}"
                if (owner, chunk) in seen:
                    assert_bitwise_equal(seen[owner, chunk], staging[owner][first:last], f"chunk {chunk} when flagged")
        assert not counters.any()


def missing_tokens(case: Experts) -> tuple[dict[str, int], int, int]:
    """A gather whose last peer never comes: what the record says, rows with a result, and rows without."""
    kernel, arrivals = case.module("grouped_matmul"), case.module("all_gather_matmul").Arrivals
    around = Surroundings(case)
    around.begin(case.first_epoch)
    signals = case.place(torch.full((len(case.shards) * case.num_chunks,), case.first_epoch, dtype=torch.int32))
    signals[-case.num_chunks :] = case.first_epoch - 1
    _, rows = case.rows_by_expert(0)
    x = case.place(payload((case.rows, case.k), case.dtype, name="x"))
    out, _ = padded(rows.count, case.n, case.dtype, device=case.device)
    table = case.table(rows, "arrivals")
    launch = partial(
        kernel.grouped_matmul, x, case.weights(0, "w"), out, arrivals(table, signals, around.group, 7), case.config(),
        tokens=rows.tokens.to(torch.int32),
    )  # fmt: skip
    launch(rehearsal=True)
    case.settle()
    launch()
    case.settle()
    done = int(out.isfinite().all(1).sum())
    return around.told(case), done, rows.count - done
