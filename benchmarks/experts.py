"""What does a layer of experts cost, in both layouts?  Two ranks: of one host, or hosts of the network lab (root).

    python benchmarks/experts.py --json benchmarks/results/FILE.json
    python benchmarks/experts.py --rate 1gbit --json benchmarks/results/FILE.json
    python benchmarks/experts.py --layer qwen3-30b-a3b --backward

Layers of known models, hidden sizes and features divided so that two ranks of a small machine hold them; number of
experts, k and activation are the model's. The ways of each layout take turns in one run. In "features" (a slice of
every expert) and "experts" (some whole experts) each rank has half of the tokens; in "whole" every rank has all of
them, a slice of every expert, and the sums of all:

gemm      the local arithmetic with everything here (a roof)
comm      what travels, once, point to point (the other roof): tokens there, sums back
torch     what a user writes: all-gather or all-to-all of torch, `F.grouped_mm`, reduce-scatter, all-to-all, all-reduce
transformers   in "whole": its own module of experts, cut by its `tp_plan` (that of GPT-OSS cuts no experts)
unfused, chunked, shared_memory, auto     ours

Every result is checked against fp64 with the elementwise bound, on some tokens, before anything is timed. With
`--backward` a sample is forward and backward of our ways; gradients are compared with those of `unfused` before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tpkernels.backends.grouped_gemms import partial_tokens
from tpkernels.comm import gloo_threads
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.grouped import TokenRows, products
from tpkernels.measure import report
from tpkernels.measure.netlab import NetlabUnavailable, run_in_netlab
from tpkernels.measure.timing import Measurement, measure
from tpkernels.ops.contract import GroupedMatmulAllReduce, gate_forward
from tpkernels.ops.routing import row_weights
from tpkernels.partition import array_split_sizes
from tpkernels.testing import grouped_expected as expected
from tpkernels.testing.numeric import Bounded

WORLD, CHECKED = 2, 24
CUT_TOKENS = ("features", "experts")
LAYOUTS = (*CUT_TOKENS, "whole")


@dataclass(frozen=True)
class Layer:
    """One of a model's, with d_model and d_ff `divided`; `tokens` of all ranks."""

    experts: int
    top_k: int
    d_model: int
    d_ff: int
    divided: int
    tokens: int
    activation: str = "swiglu"


LAYERS = {
    "mixtral-8x7b": Layer(8, 2, 4096, 14336, 4, 2048),
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768, 2, 2048),
    "deepseek-v3": Layer(256, 8, 7168, 2048, 8, 2048),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, 4, 2048, "clamped_swiglu"),
}


class Ways:
    """The ways of one layer, on this rank; every rank has the operands of all, and its own ones on the device."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.layer, self.rank = layer, dist.get_rank()
        self.group: Any = dist.group.WORLD
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=generator)).to(dtype)

        hidden, features = layer.d_model // layer.divided, layer.d_ff // layer.divided
        self.x = random(layer.tokens, hidden)
        self.gate, self.up = (random(layer.experts, features, hidden, scale=hidden**-0.5) for _ in range(2))
        self.down = random(layer.experts, hidden, features, scale=features**-0.5)
        scores = torch.randn(layer.tokens, layer.experts, generator=generator).softmax(-1)
        weights, self.experts = scores.topk(layer.top_k)
        self.weights = weights / weights.sum(-1, keepdim=True)
        half = layer.tokens // WORLD
        self.own = slice(self.rank * half, (self.rank + 1) * half)
        self.device = torch.device(device)
        self.own_x, *routing = (
            one[self.own].to(device, copy=True) for one in (self.x, self.experts, self.weights)
        )  # fmt: skip
        self.own_routing = tpk.Routing(*routing)

    def slices(self, layout: str, rank: int) -> list[Tensor]:
        """Gate, up and down of a rank."""
        if layout != "experts":
            cut = [(self.gate, 1), (self.up, 1), (self.down, 2)]
            return [tpk.array_split(one, WORLD, dim)[rank].contiguous() for one, dim in cut]
        return [tpk.array_split(one, WORLD, 0)[rank].contiguous() for one in (self.gate, self.up, self.down)]

    @cached_property
    def held(self) -> dict[str, list[Tensor]]:
        held = {layout: [one.to(self.device) for one in self.slices(layout, self.rank)] for layout in CUT_TOKENS}
        return {**held, "whole": held["features"]}

    def ours(self, layout: str, implementation: str, held: list[Tensor], x: Tensor, routing: tpk.Routing) -> Tensor:
        gate, up, down = held
        options: dict[str, Any] = {"implementation": implementation}
        h: Any  # a gated pair makes one tensor
        if layout == "features":
            h, whole = tpk.all_gather_grouped_matmul(
                x, (gate, up), routing, self.group, activation=self.layer.activation, **options
            )
            return tpk.grouped_matmul_reduce_scatter(h, down, whole, self.group, **options)
        if layout == "whole":
            h = tpk.copy_grouped_matmul(x, (gate, up), routing, self.group, activation=self.layer.activation)
            return tpk.grouped_matmul_all_reduce(h, down, routing, self.group, **options)
        sizes = array_split_sizes(self.layer.experts, WORLD)
        h, whole = tpk.dispatch_grouped_matmul(
            x, (gate, up), routing, self.group, activation=self.layer.activation, expert_sizes=sizes, **options
        )
        return tpk.grouped_matmul_combine(h, down, whole, self.group, expert_sizes=sizes, **options)

    def forward(self, layout: str, implementation: str) -> Callable[[], Tensor]:
        x, routing = self.given(layout)
        return lambda: self.ours(layout, implementation, self.held[layout], x, routing)

    def given(self, layout: str) -> tuple[Tensor, tpk.Routing]:
        """This rank's tokens."""
        if layout == "whole":
            x, experts, weights = (one.to(self.device) for one in (self.x, self.experts, self.weights))
            return x, tpk.Routing(experts, weights)
        return self.own_x, self.own_routing

    def both_passes(self, layout: str, implementation: str) -> Callable[[], list[Tensor]]:
        held = [one.clone().requires_grad_() for one in self.held[layout]]
        tokens, routing = self.given(layout)
        x, weights = tokens.clone().requires_grad_(), routing.weights.clone().requires_grad_()
        dy = torch.ones_like(x)

        def run() -> list[Tensor]:
            y = self.ours(layout, implementation, held, x, tpk.Routing(routing.experts, weights))
            return [y.detach(), *torch.autograd.grad(y, [x, weights, *held], dy)]

        return run

    # -- roofs -----------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> dict[str, Any]:
        layer, half = self.layer, self.layer.tokens // WORLD
        dealt = DealtRows(self.experts, array_split_sizes(layer.experts, WORLD), [half] * WORLD, self.rank)
        all_rows = TokenRows(self.experts, layer.experts)
        return {"features": all_rows, "experts": dealt, "whole": all_rows}

    def gemm(self, layout: str) -> Callable[[], Tensor]:
        rows, (gate, up, down) = self.rows[layout], self.held[layout]
        x = self.x[rows.received] if layout == "experts" else self.x
        weights = row_weights(tpk.Routing(self.experts, self.weights), rows, x.dtype)

        def run() -> Tensor:
            pair = products(x, [one.transpose(1, 2) for one in (gate, up)], rows)
            h = gate_forward(self.layer.activation, *pair)
            call = GroupedMatmulAllReduce([h], [down.transpose(1, 2)], rows, weights)
            partial = x.new_empty(rows.num_tokens, x.shape[1])
            partial_tokens(call, 0, rows.num_tokens, partial)
            return partial

        return run

    def comm(self, layout: str) -> Callable[[], None]:
        peer, width = 1 - self.rank, self.x.shape[1]
        half = self.layer.tokens // WORLD
        there, back = half, half
        if layout == "experts":
            counts = self.rows[layout].counts
            there, back = counts[self.rank][peer], counts[peer][self.rank]
        bound_there, bound_back = self.x.new_ones(there, width), self.x.new_ones(back, width)

        def run() -> None:
            for sent, received in ((bound_there, bound_back), (bound_back.clone(), bound_there.clone())):
                works = [dist.irecv(received, peer), dist.isend(sent, peer)]
                for work in works:
                    assert work is not None
                    work.wait()

        return run

    # -- torch -----------------------------------------------------------------------------------------------------

    def torch_way(self, layout: str) -> Callable[[], Tensor]:
        run = {"features": self._torch_features, "experts": self._torch_experts, "whole": self._torch_whole}[layout]

        def timed() -> Tensor:
            with gloo_threads.as_torch_made_them():
                return run()

        return timed

    def block(self, x: Tensor, counts: Tensor, held: list[Tensor]) -> Tensor:
        offsets = counts.cumsum(0).to(torch.int32)
        gate, up, down = held
        pair = [F.grouped_mm(x, one.transpose(1, 2), offs=offsets) for one in (gate, up)]
        return F.grouped_mm(gate_forward(self.layer.activation, *pair), down.transpose(1, 2), offs=offsets)

    def _torch_features(self) -> Tensor:
        experts = torch.empty_like(self.experts)
        x, weights = torch.empty_like(self.x), torch.empty_like(self.weights)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for whole, part in ((x, self.own_x), (experts, self.own_routing.experts), (weights, self.own_routing.weights)):
            gather(whole, part)
        partial = self._partial(x, experts, weights)
        mine = torch.empty_like(self.own_x)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(mine, partial)
        return mine

    def _torch_whole(self) -> Tensor:
        y = self._partial(self.x, self.experts, self.weights)
        dist.all_reduce(y)
        return y

    def _partial(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """This rank's slices of the experts, summed over those of a token."""
        layer, slots = self.layer, experts.flatten().argsort(stable=True)
        tokens, counts = slots // layer.top_k, experts.flatten().bincount(minlength=layer.experts)
        y = self.block(x[tokens], counts, self.held["features"]) * weights.flatten()[slots, None]
        return torch.zeros(x.shape).index_add_(0, tokens, y).to(x.dtype)

    def of_transformers(self, name: str) -> Callable[[], Tensor] | None:
        from experts_of_transformers import cut_experts  # transformers is not everywhere where the other ways are timed

        module = cut_experts(name, self.layer.top_k, self.gate, self.up, self.down)
        if module is None:
            return None
        weights = self.weights.to(self.x.dtype)

        def timed() -> Tensor:
            with gloo_threads.as_torch_made_them(), torch.no_grad():
                return module(self.x, self.experts, weights)

        return timed

    def _torch_experts(self) -> Tensor:
        layer, (experts, weights) = self.layer, self.own_routing
        dealt = array_split_sizes(layer.experts, WORLD)
        slots = experts.flatten().argsort(stable=True)
        tokens, counts = slots // layer.top_k, experts.flatten().bincount(minlength=layer.experts)
        arriving = counts.new_empty(WORLD * dealt[self.rank])
        dist.all_to_all_single(arriving, counts, [dealt[self.rank]] * WORLD, list(dealt))
        sent = [int(part.sum()) for part in counts.split(list(dealt))]
        by_source = arriving.view(WORLD, -1)
        received = by_source.sum(1).tolist()
        x = self.own_x.new_empty(sum(received), self.own_x.shape[1])
        dist.all_to_all_single(x, self.own_x[tokens], received, sent)
        numbers = torch.arange(dealt[self.rank]).repeat(WORLD).repeat_interleave(arriving)
        order = numbers.argsort(stable=True)
        y = torch.empty_like(x)
        y[order] = self.block(x[order], by_source.sum(0), self.held["experts"])
        back = self.own_x.new_empty(len(slots), x.shape[1])
        dist.all_to_all_single(back, y, sent, received)
        weighted = back * weights.flatten()[slots, None]
        return torch.zeros(self.own_x.shape).index_add_(0, tokens, weighted).to(x.dtype)

    # -- the judge -------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> Tensor:
        """Some of this rank's tokens."""
        half = self.layer.tokens // WORLD
        return torch.linspace(0, half - 1, min(CHECKED, half), dtype=torch.float64).long()

    def _bound(self, layout: str) -> Bounded:
        dtype, at = self.x.dtype, self.places + self.own.start
        experts, weights, x = self.experts[at], self.weights[at], self.x[at]

        def h(gate: Tensor, up: Tensor) -> Bounded:
            before = [expected.products(x, one, experts, dtype=dtype) for one in (gate, up)]
            return before[0].gated(self.layer.activation, before[1], dtype=dtype).rounded(dtype)

        if layout == "experts":
            sizes = array_split_sizes(self.layer.experts, WORLD)
            return expected.combined([h(self.gate, self.up)], [self.down], experts, weights, sizes, dtype=dtype)
        parts = [self.slices(layout, rank) for rank in range(WORLD)]
        hs = [[h(gate, up)] for gate, up, _ in parts]
        return expected.reduced(hs, [[down] for _, _, down in parts], experts, weights, dtype=dtype)

    @cached_property
    def bounds(self) -> dict[str, Bounded]:
        bounds = {layout: self._bound(layout) for layout in CUT_TOKENS}
        return {**bounds, "whole": bounds["features"]}

    def verify(self, name: str, result: object) -> None:
        layout, way = name.split(" ")
        if way in ("gemm", "comm"):
            return
        y = result[0] if isinstance(result, list) else result
        assert isinstance(y, Tensor)
        bound = self.bounds[layout]
        if way in ("torch", "transformers"):  # round a weighted row, or a sum of two ranks, where ours does not
            bound = Bounded(bound.value, 2 * bound.error)
        bound.check(y[self.places + self.own.start] if layout == "whole" else y[self.places], name)


def run_rank(names: list[str], dtype_name: str, backward: bool, repeats: int, small: bool) -> list[dict[str, Any]]:
    tpk.init(device="cpu")
    torch.set_num_threads(1)
    layers = {name: LAYERS[name] for name in names}
    if small:
        layers = {name: replace(one, tokens=64, d_model=64, d_ff=128, divided=1) for name, one in layers.items()}
    dtype = getattr(torch, dtype_name)
    return [_run_layer(name, layer, dtype, backward, repeats) for name, layer in layers.items()]


def _run_layer(name: str, layer: Layer, dtype: torch.dtype, backward: bool, repeats: int) -> dict[str, Any]:
    ways = Ways(layer, dtype)
    candidates: dict[str, Callable[[], object]] = {}
    for layout in LAYOUTS:
        able = _able(layout, ways)
        if backward:
            candidates |= {f"{layout} {way}": ways.both_passes(layout, way) for way in (*able, "auto")}
            _same_gradients(layout, able, candidates)
            continue
        candidates[f"{layout} gemm"], candidates[f"{layout} comm"] = ways.gemm(layout), ways.comm(layout)
        candidates[f"{layout} torch"] = ways.torch_way(layout)
        candidates |= {f"{layout} {way}": ways.forward(layout, way) for way in (*able, "auto")}
        if layout == "whole" and (theirs := ways.of_transformers(name)) is not None:
            candidates["whole transformers"] = theirs
    times = measure(candidates, repeats=repeats, warmup=2, verify=ways.verify)
    return {
        "layer": name, **vars(layer), "dtype": str(dtype).removeprefix("torch."),
        "passes": "forward + backward" if backward else "forward",
        "summary": {layout: _summary(layout, times) for layout in LAYOUTS},
        "times": {key: report.measurement_to_json(time) for key, time in times.items()},
    }  # fmt: skip


def _able(layout: str, ways: Ways) -> list[str]:
    hidden, features = ways.x.shape[1], ways.up.shape[1]
    op, n, k = {
        "features": ("all_gather_grouped_matmul", 2 * features, hidden),
        "experts": ("dispatch_grouped_matmul", 2 * features, hidden),
        "whole": ("grouped_matmul_all_reduce", hidden, features),
    }[layout]
    said = tpk.explain(
        op, m=ways.layer.tokens, n=n, k=k, dtype=ways.x.dtype, group=ways.group,
        experts=ways.layer.experts, top_k=ways.layer.top_k,
    )  # fmt: skip
    return [one.name for one in said.candidates if one.refusal is None]


def _same_gradients(layout: str, able: list[str], candidates: dict[str, Callable[[], object]]) -> None:
    found: dict[str, Any] = {way: candidates[f"{layout} {way}"]() for way in able}
    for way in able[1:]:
        for number, (one, other) in enumerate(zip(found[way], found["unfused"], strict=True)):
            off = float((one - other).abs().max() / (1e-30 + other.abs().max()))
            limit = 16 * torch.finfo(other.dtype).eps
            assert off <= limit, (
                f"{layout} {way}: result {number} is off by {off:.2e} of the largest, limit {limit:.2e}"
            )


def _summary(layout: str, times: dict[str, Measurement]) -> dict[str, float | str | None]:
    mine = {key.split(" ")[1]: time.median for key, time in times.items() if key.startswith(layout)}
    fused = {way: mine[way] for way in ("chunked", "shared_memory") if way in mine}
    best = min(fused, key=lambda way: fused[way])
    roof = max(mine["gemm"], mine["comm"]) if "gemm" in mine else None
    return {
        "fused": best, "fused_ms": 1e3 * fused[best], "auto_ms": 1e3 * mine["auto"],
        "fused_over_roof": None if roof is None else fused[best] / roof,
        "torch_over_fused": mine["torch"] / fused[best] if "torch" in mine else None,
        "transformers_over_fused": mine["transformers"] / fused[best] if "transformers" in mine else None,
        "unfused_over_fused": mine["unfused"] / fused[best],
        "overlap_efficiency": None if roof is None else (mine["unfused"] - fused[best]) / (mine["unfused"] - roof),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", choices=tuple(LAYERS), help="repeatable; default: all")
    parser.add_argument("--rate", help="of the network lab's links, such as 1gbit (root); default: one host")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--small", action="store_true", help="64 tokens of 64 features: does it run?")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    arguments = (args.layer or list(LAYERS), args.dtype, args.backward, args.repeats, args.small)
    try:
        if args.rate:
            results = run_in_netlab(run_rank, WORLD, *arguments, rate=args.rate, timeout=3600)[0]
        else:
            results = tpk.launch(run_rank, WORLD, *arguments)[0]
    except NetlabUnavailable as error:
        print(f"skipped: {error}", file=sys.stderr)
        return 1
    for result in results:
        print(f"{result['layer']} / {result['divided']}, {result['dtype']}, {result['passes']}, medians in ms")
        for layout in LAYOUTS:
            cells = [
                f"{key.split(' ')[1]} {time['median_ms']:.1f}"
                for key, time in result["times"].items()
                if key.startswith(layout)
            ]
            print(f"  {layout:<9} {'  '.join(cells)}")
    if args.json:
        setup = {"rate": args.rate, "world_size": WORLD, "threads_per_rank": 1, "repeats": args.repeats}
        content = {**report.describe_environment(setup), "results": results}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
