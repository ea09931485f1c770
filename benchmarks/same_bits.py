"""What the same bits at every degree rest on, on this machine, and what they cost.

    python benchmarks/same_bits.py shapes --trials 60
    python benchmarks/same_bits.py cost --ranks 2 --json benchmarks/results/FILE.json
    python benchmarks/same_bits.py cost --netlab 1gbit          # two hosts of the network lab (root)

`shapes`: in how many random GEMMs of this library do the bits of a result change with the number of rows, of columns,
the strides, the alignment and the number of threads?  The docstring of `tpkernels/gemm/canonical.py` has the table of
one machine; it assumes of the library only that equal calls give equal bits (row "the same call").

`cost`: with `same_bits=8` against without, in turns in one run, one thread per rank: the ops of a layer's two GEMMs,
forward and backward; the sequence-parallel MLP block of target P3 (`mlp_block.py`); and a training step of the model of
`tpkernels profile`, cut with sequence parallelism, with torch's AdamW.  Results of ops and block are compared before
they are timed; the last column has CPU time of the first rank, which says more on a busy machine.  With `--ranks 1` the
other side is `F.linear`.  With `--netlab` it also says which share of the block's bytes, with and without, crossed the
link while a GEMM was executing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.comm import timeline
from tpkernels.comm.groups import resolve
from tpkernels.measure import report
from tpkernels.measure.gpt import GPT, Sizes
from tpkernels.measure.netlab import Netlab
from tpkernels.measure.timing import measure
from tpkernels.measure.trace import RankTrace, trace_overlap

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mlp_block import MlpBlock

SAME_BITS = 8
CASES = ((256, 1024, 4096), (2048, 1024, 4096), (512, 2048, 8192))
"""Rows, features of the residual, features between the two GEMMs."""
BLOCK = (2048, 2048, 8192)
"""The same of P3."""
WHATS = ("ops", "P3 block", "training")
RECORDED = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 24, 48, 64, 100, 128, 200, 256, 300, 384)
KINDS = ("x @ w^T", "x @ w", "x^T @ w")


def product(kind: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.t() if kind == "x^T @ w" else a, b.t() if kind == "x @ w^T" else b)


def placed(x: Tensor, *, more: int, shift: int) -> Tensor:
    """The same values in rows that are `more` elements apart than they need be, `shift` elements into the memory."""
    rows, columns = x.shape
    memory = torch.zeros(rows * (columns + more) + shift + 64, dtype=x.dtype)
    found = memory[shift:].as_strided((rows, columns), (columns + more, 1))
    found.copy_(x)
    return found


def shapes(trials: int) -> dict[str, dict[str, list[int]]]:
    """what changed -> dtype -> in how many trials the bits did, by kind of product."""
    torch.set_num_threads(1)
    generator, pick = torch.Generator().manual_seed(1), random.Random(1)
    found: dict[str, dict[str, list[int]]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for index, kind in enumerate(KINDS):
            for _ in range(trials):
                m, n, k = pick.choice(SIZES), 2 * pick.choice(SIZES), pick.choice((*SIZES, 512, 1024))
                a = torch.randn((k, m) if kind == "x^T @ w" else (m, k), generator=generator).to(dtype)
                b = torch.randn((n, k) if kind == "x @ w^T" else (k, n), generator=generator).to(dtype)
                for what, same in trial(kind, a, b, pick).items():
                    row = found.setdefault(what, {}).setdefault(str(dtype).removeprefix("torch."), [0, 0, 0])
                    row[index] += not same
    return found


def trial(kind: str, a: Tensor, b: Tensor, pick: random.Random) -> dict[str, bool]:
    whole = product(kind, a, b)
    (m, n), rows_dim = whole.shape, 1 if kind == "x^T @ w" else 0
    low = pick.randrange(m)
    count = pick.randint(1, m - low)
    some = product(kind, a.narrow(rows_dim, low, count).contiguous(), b)
    half = product(kind, a, b.narrow(0 if kind == "x @ w^T" else 1, 0, n // 2).contiguous())
    pairs = {
        "the same call": (product(kind, a, b), whole),
        "number of rows": (some, whole[low : low + count]),
        "half of the columns": (half, whole[:, : n // 2]),
        "stride of the left operand": (product(kind, placed(a, more=8, shift=0), b), whole),
        "stride of the right operand": (product(kind, a, placed(b, more=8, shift=0)), whole),
        "alignment of both": (product(kind, placed(a, more=0, shift=1), placed(b, more=0, shift=1)), whole),
    }
    torch.set_num_threads(2)
    pairs["two threads"] = product(kind, a, b), whole
    torch.set_num_threads(1)
    return {what: torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
            for what, (one, other) in pairs.items()}  # fmt: skip


def candidates(rows: int, width: int, inner: int, dtype: torch.dtype, groups: dict[str, Any]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rows)
    x, up, down, dy = (
        torch.randn(*shape, generator=generator).mul(0.1).to(dtype)
        for shape in ((rows, width), (inner, width), (width, inner), (rows, width))
    )
    leaves = [x, up.chunk(world)[rank].clone(), down.chunk(world, 1)[rank].contiguous()]
    for leaf in leaves:
        leaf.requires_grad_()

    def step(group: Any) -> tuple[Tensor, ...]:
        y = tpk.matmul_all_reduce(tpk.copy_matmul(leaves[0], leaves[1], group), leaves[2], group)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return {name: lambda group=group: step(group) for name, group in groups.items()}


def agree(both: dict[str, Callable[[], tuple[Tensor, ...]]]) -> None:
    """Equal but for roundings; the products of bf16 are rounded block by block."""
    for index, (one, other) in enumerate(zip(*[results() for results in both.values()], strict=True)):
        one, other = one.detach(), other.detach()
        limit = 16 * torch.finfo(one.dtype).eps
        off = float((one - other).abs().max() / other.abs().max())
        assert off <= limit, f"result {index} differs by {off:.2e} of the largest, at most {limit:.2e}"


def blocks(dtype: torch.dtype, groups: dict[str, Any]) -> dict[str, Any]:
    m, d, ff = BLOCK
    return {name: MlpBlock(m, d, ff, dtype, group).ours("auto") for name, group in groups.items()}


def training_steps(dtype: torch.dtype, groups: dict[str, Any]) -> dict[str, Any]:
    sizes = Sizes()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)
    inputs = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def trained(name: str, group: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model = GPT(sizes).to(dtype)
        plan = tpk.make_plan(model, group.size(), sequence_parallel=True, example_inputs=inputs)
        same_bits = SAME_BITS if name == "on" else None
        model = tpk.parallelize(model, group, plan, example_inputs=inputs, same_bits=same_bits)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            model(*inputs).backward()
            tpk.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {name: trained(name, group) for name, group in groups.items()}


def recorded(both: dict[str, Any]) -> list[RankTrace]:
    traces = []
    for _ in range(RECORDED):
        for name, run in both.items():
            dist.barrier()
            start = timeline.now()
            with timeline.recording() as events:
                run()
            traces.append(RankTrace(dist.get_rank(), name, start, timeline.now(), events.events))
    return traces


class CpuSeconds:
    """A function, and the CPU seconds of this process in each of its calls: on a busy machine they say more."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run, self.seconds = run, list[float]()

    def __call__(self) -> object:
        before = time.process_time()
        found = self.run()
        self.seconds.append(time.process_time() - before)
        return found


def ranked(
    repeats: int, dtypes: list[str], only: list[str]
) -> tuple[list[dict[str, Any]], list[tuple[int, list[RankTrace]]]]:
    """The rows, and of the rows of blocks the timelines."""
    tpk.init(device="cpu")
    torch.set_num_threads(1)
    groups = {"off": dist.group.WORLD, "on": dist.new_group()}
    resolve(groups["on"]).keep_same_bits(SAME_BITS)
    found: list[dict[str, Any]] = []
    traces = []
    for dtype in (DTYPES[name] for name in dtypes):
        rows: list[tuple[str, tuple[int, int, int], Callable[[], dict[str, Any]]]] = []
        rows += [("ops", case, partial(candidates, *case, dtype, groups)) for case in CASES]
        if dist.get_world_size() > 1:
            rows += [
                ("P3 block", BLOCK, partial(blocks, dtype, groups)),
                ("training", (0, 0, 0), partial(training_steps, dtype, groups)),
            ]
        for what, case, make in (row for row in rows if row[0] in only):
            both = make()
            if what != "training":
                agree(both)
            counted = {name: CpuSeconds(run) for name, run in both.items()}
            times = measure(counted, repeats=repeats, warmup=1)
            of_cpu = [on / off for on, off in zip(counted["on"].seconds[1:], counted["off"].seconds[1:], strict=True)]
            if what == "P3 block":
                traces.append((len(found), recorded(both)))
            ratios = [on / off for on, off in zip(times["on"].seconds, times["off"].seconds, strict=True)]
            row = {
                "what": what, "rows": case[0], "width": case[1], "inner": case[2],
                "dtype": str(dtype).removeprefix("torch."),
                "ratio": statistics.median(ratios), "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                "ratio_of_cpu_time": statistics.median(of_cpu),
                "times": {name: report.measurement_to_json(time) for name, time in times.items()},
            }  # fmt: skip
            found.append(row)
            if dist.get_rank() == 0:
                print(line(row), flush=True)
    return found, traces


def in_netlab(rate: str, repeats: int, dtypes: list[str], only: list[str]) -> list[dict[str, Any]]:
    with Netlab(2, rate=rate, sample_interval_s=0.002) as lab:
        per_rank = lab.run(ranked, repeats, dtypes, only, timeout=3000)
    results: list[dict[str, Any]] = per_rank[0][0]
    hidden: dict[int, dict[str, list[float]]] = {}
    for _, of_rank in per_rank:
        for number, traces in of_rank:
            for trace in traces:
                trace.samples = lab.samples[trace.rank]
                hidden.setdefault(number, {}).setdefault(trace.label, []).append(trace_overlap(trace))
    for number, by_name in hidden.items():
        results[number]["under_gemm"] = {name: statistics.median(shares) for name, shares in by_name.items()}
        print(f"{results[number]['dtype']}: bytes of the block under a GEMM: {results[number]['under_gemm']}")
    return results


def line(row: dict[str, Any]) -> str:
    off, on = (row["times"][name]["median_ms"] for name in ("off", "on"))
    sizes = f"{row['dtype']:<10}{row['what']:<10}{row['rows']:>6}{row['width']:>7}{row['inner']:>7}"
    return f"{sizes}{off:>10.1f}{on:>10.1f}{row['ratio']:>10.2f}{row['ratio_of_cpu_time']:>10.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shapes", "cost"))
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--netlab", metavar="RATE", help="two hosts of the network lab, one rank each")
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="repeatable; default: both")
    parser.add_argument("--only", action="append", choices=WHATS, help="repeatable; default: all")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    results: Any
    if args.what == "shapes":
        results = shapes(args.trials)
        print(f"of {args.trials} each of {', '.join(KINDS)}, the bits changed with")
        for what, by_dtype in results.items():
            print(f"{what:<30}" + "".join(f"{dtype:>10} {counts!s:<14}" for dtype, counts in by_dtype.items()))
    else:
        print(
            f"{'dtype':<10}{'what':<10}{'rows':>6}{'width':>7}{'inner':>7}{'off ms':>10}{'on ms':>10}{'on / off':>10}"
            f"{'of CPU':>10}",
            flush=True,
        )
        dtypes, only = args.dtype or list(DTYPES), args.only or list(WHATS)
        if args.netlab:
            results = in_netlab(args.netlab, args.repeats, dtypes, only)
        else:
            results = tpk.launch(ranked, args.ranks, args.repeats, dtypes, only)[0][0]
    if args.json:
        setup = {"world_size": args.ranks if args.what == "cost" else 1, "threads": 1, "repeats": args.repeats}
        setup |= {"rate": args.netlab} if args.netlab else {}
        content = {**report.describe_environment(setup), "results": results}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
