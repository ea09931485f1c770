"""The grouped kernel against `F.grouped_mm`: one rank's part of layers of known models, with everything there.

Up: tokens times gate and up of their experts, and the activation; ours picks the tokens by itself. Down: rows times
their experts, and the weighted sum of a token's rows, in one launch of ours. Each is timed for the tokens of one rank,
and for those of `RANKS` ranks whose flags are preset, so that tiles end with chunks and begin with waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_steps.lab import Lab, LoneRank
from gpu_steps.outcome import Recorder, Row, times_of
from gpu_steps.roofline import loop_share
from tpkernels.backends.symmetric.grouped_launches import Cut, cut_of, tile_table
from tpkernels.gemm.grouped import TokenRows
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels.config import SMALLEST_BLOCK, GemmConfig, configure_grouped
from tpkernels.kernels.grouped_matmul import Combination, grouped_matmul
from tpkernels.ops.contract import gate_forward
from tpkernels.partition import Layout, array_split_sizes
from tpkernels.testing import grouped_expected as expected
from tpkernels.testing.numeric import Bounded

RANKS, COMPILERS, CHECKED = 8, 8, 12
OURS, ALONE, RATE, WAITS = (
    "torch / ours", "grouped_mm alone / ours", "TFLOP/s of ours", "tokens of 8 ranks / of one"
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """d_ff: the features of one rank, where the model's are cut over some."""

    experts: int
    top_k: int
    d_model: int
    d_ff: int
    tokens: int
    activation: str = "swiglu"


LAYERS = {
    "Mixtral-8x7B / 2": Layer(8, 2, 4096, 7168, 8192),
    "Mixtral-8x7B / 2, few tokens": Layer(8, 2, 4096, 7168, 128),
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768, 8192),
    "DeepSeek-V3 / 8": Layer(256, 8, 7168, 256, 8192),
    "GPT-OSS-20B": Layer(32, 4, 2880, 2880, 8192, "clamped_swiglu"),
}


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    for name, layer in LAYERS.items():
        measure_layer(lab, recorder, name, layer)


def measure_layer(lab: Lab, recorder: Recorder, name: str, layer: Layer) -> None:
    bench = _Bench(lab, layer)
    for half in ("up", "down"):
        _predict(lab, recorder, f"{name}, {half}", bench, half)
    for half in ("up", "down"):
        _measure_half(lab, recorder, f"{name}, {half}", bench, half)
    bench.rank.close()


def check_layer(lab: Lab, layer: Layer) -> None:
    """Raise unless both halves are right, of the tokens of one rank and of several."""
    bench = _Bench(lab, layer)
    for half in ("up", "down"):
        bound = bench.bound(half)
        for ranks in (1, RANKS):
            launch = bench.launch(half, ranks)
            launch(rehearsal=True)
            bench.spoil(half)
            launch()
            bench.rank.raise_if_failed()
            bench.check(f"experts, {half}, tokens of {ranks} ranks", half, bench.out(half), bound)
    bench.rank.close()


def _predict(lab: Lab, recorder: Recorder, problem: str, bench: _Bench, half: str) -> None:
    """What torch does beside its GEMMs is three passes over the rows, at the bandwidth of a copy."""
    card, rows, (n, k) = lab.card, bench.rows.count, bench.sizes(half)
    library = card.library_gemm_s(rows, n, k, experts=bench.layer.experts)
    ours, beside = library / loop_share(k, drains=True), 3 * card.copy_s(2 * rows * max(n, k))
    recorder.predict("-", problem, OURS, (library + beside) / ours)
    recorder.predict("-", problem, ALONE, library / ours)
    recorder.predict("-", problem, RATE, 2e-12 * rows * n * k / ours)
    recorder.predict("-", problem, WAITS, 1.05)


def _measure_half(lab: Lab, recorder: Recorder, problem: str, bench: _Bench, half: str) -> None:
    launches = {name: bench.launch(half, ranks) for name, ranks in (("ours", 1), ("ours, 8 ranks", RANKS))}
    with ThreadPoolExecutor(COMPILERS) as pool:  # their compilation takes longer than all that is measured
        list(pool.map(lambda launch: launch(rehearsal=True), launches.values()))
    candidates: dict[str, Callable[[], object]] = {
        "torch": partial(bench.torch_way, half), "grouped_mm": partial(bench.library, half), **launches
    }  # fmt: skip
    bound = bench.bound(half)
    for name, call in candidates.items():
        bench.spoil(half)
        result = call()
        bench.rank.raise_if_failed()
        found = result if isinstance(result, Tensor) else bench.out(half)
        if name == "torch":  # rounds a weighted row, or a gated product, where ours does not
            bench.check(f"{problem} {name}", half, found, Bounded(bound.value, 2 * bound.error))
        elif name != "grouped_mm":
            bench.check(f"{problem} {name}", half, found, bound)
    measured = lab.measure(candidates)
    bench.rank.raise_if_failed()
    median, times, count = {name: one.median for name, one in measured.items()}, times_of(measured), lab.repeats
    n, k = bench.sizes(half)
    values = {
        OURS: median["torch"] / median["ours"], ALONE: median["grouped_mm"] / median["ours"],
        RATE: 2e-12 * bench.rows.count * n * k / median["ours"], WAITS: median["ours, 8 ranks"] / median["ours"],
    }  # fmt: skip
    for what, value in values.items():
        recorder.row(Row("-", problem, what, value, "flags preset", "", count, times if what == OURS else {}))


class _Bench:
    """The operands of one layer, and what works on them."""

    def __init__(self, lab: Lab, layer: Layer) -> None:
        self.lab, self.layer, self.rank = lab, layer, LoneRank(lab, RANKS)
        self.rank.next_call()
        self.rank.preset()
        tokens, experts, hidden, features = layer.tokens, layer.experts, layer.d_model, layer.d_ff
        self.x, self.h = lab.random(0, tokens, hidden), lab.random(1, tokens * layer.top_k, features)
        self.gate, self.up = (lab.random(seed, experts, features, hidden).mul_(hidden**-0.5) for seed in (2, 3))
        self.down = lab.random(4, experts, hidden, features).mul_(features**-0.5)
        scores = lab.random(5, tokens, experts, dtype=torch.float32).softmax(1)
        self.weights, self.experts = scores.topk(layer.top_k, 1)
        self.rows = TokenRows(self.experts, experts)
        self.row_weights = self.rows.of_slots(self.weights)
        self.tokens = self.rows.tokens.to(torch.int32)
        self.ends = self.experts.flatten().bincount(minlength=experts).cumsum(0).to(torch.int32)
        self.products, self.sums = self.x.new_empty(len(self.h), hidden), torch.empty_like(self.x)
        self.activated, self.picked = torch.empty_like(self.h), self.x.index_select(0, self.rows.tokens)

    def sizes(self, half: str) -> tuple[int, int]:
        """N and K of all weights of a half."""
        hidden, features = self.layer.d_model, self.layer.d_ff
        return (2 * features, hidden) if half == "up" else (hidden, features)

    def out(self, half: str) -> Tensor:
        return self.activated if half == "up" else self.sums

    def spoil(self, half: str) -> None:
        self.out(half).fill_(float("nan"))

    # --- torch

    def torch_way(self, half: str) -> Tensor:
        if half == "up":
            x = self.x.index_select(0, self.rows.tokens)
            gate, up = (F.grouped_mm(x, one.transpose(1, 2), offs=self.ends) for one in (self.gate, self.up))
            return gate_forward(self.layer.activation, gate, up)
        y = F.grouped_mm(self.h, self.down.transpose(1, 2), offs=self.ends) * self.row_weights[:, None]
        total = torch.zeros(self.x.shape, dtype=y.dtype, device=y.device)
        return total.index_add_(0, self.rows.tokens, y).to(self.x.dtype)

    def library(self, half: str) -> None:
        """The GEMMs alone."""
        if half == "up":
            for one in (self.gate, self.up):
                F.grouped_mm(self.picked, one.transpose(1, 2), offs=self.ends)
        else:
            F.grouped_mm(self.h, self.down.transpose(1, 2), offs=self.ends)

    # --- ours

    def launch(self, half: str, ranks: int) -> Callable[..., object]:
        """Of the tokens of so many ranks, whose chunks have all come (up), or leave one by one (down)."""
        layer, lab, device = self.layer, self.lab, self.x.device
        n, k = (layer.d_ff, layer.d_model) if half == "up" else (layer.d_model, layer.d_ff)
        config = configure_grouped(
            capability=lab.capability, num_sms=lab.num_sms, tokens=layer.tokens, top_k=layer.top_k,
            experts=layer.experts, n=n, k=k, dtype="bfloat16", world_size=ranks, moved_row_bytes=2 * layer.d_model,
            dual=half == "up",
        )  # fmt: skip
        cut = cut_of(Layout(1, array_split_sizes(layer.tokens, ranks), 1), config.num_chunks, 0, half == "up")
        table = tile_table(self.rows, cut, config, device)
        arrivals = gather.Arrivals(table, self.rank.flags, self.rank.table, 1)
        if half == "up":
            return partial(
                grouped_matmul, self.x, self.gate, self.activated, arrivals, config, tokens=self.tokens,
                activation=layer.activation, weight_up=self.up,
            )  # fmt: skip
        return partial(
            grouped_matmul, self.h, self.down, self.products, arrivals, config,
            combination=self._combination(cut, config),
        )  # fmt: skip

    def _combination(self, cut: Cut, config: GemmConfig) -> Combination:
        device, row_bytes = self.x.device, self.sums.stride(0) * self.sums.element_size()
        chunks, bases = [], []
        for owner, ranges in enumerate(cut.ranges):
            first = cut.bounds[ranges[0][0]]
            bases.append(self.sums.data_ptr() + first * row_bytes)
            for low, high in ranges:
                start, stop = cut.bounds[low], cut.bounds[high]
                chunks.append([owner, start, stop - start, start - first])
        flags = [self.rank.flags.data_ptr() + 4 * slot for slot in range(len(chunks))]
        counters = len(chunks) * (1 + -(-self.layer.d_model // SMALLEST_BLOCK))
        return Combination(
            staging=torch.tensor(bases, device=device), rows_of_tokens=self.rows.of_tokens().to(torch.int32),
            chunks=torch.tensor(chunks, dtype=torch.int32, device=device), flags=torch.tensor(flags, device=device),
            counters=torch.zeros(counters, dtype=torch.int32, device=device), staging_dtype=self.sums.dtype,
            staging_stride=self.sums.stride(0), row_weights=self.row_weights,
        )  # fmt: skip

    # --- the judge, on the host: some rows, and the experts that they have

    def _sample(self, count: int) -> Tensor:
        return torch.linspace(0, count - 1, min(CHECKED, count), dtype=torch.float64).long()

    def bound(self, half: str) -> Bounded:
        """Of the rows of some tokens, or of their sums, as `grouped_expected` orders them."""
        at, dtype = self._sample(self.layer.tokens), self.x.dtype
        used, numbered = self.experts[at.to(self.experts.device)].cpu().unique(return_inverse=True)

        def of(weight: Tensor) -> Tensor:
            return weight[used.to(weight.device)].cpu()

        if half == "up":
            x = self.x[at.to(self.x.device)].cpu()
            before = [expected.products(x, of(one), numbered, dtype=dtype) for one in (self.gate, self.up)]
            return before[0].gated(self.layer.activation, before[1], dtype=dtype).rounded(dtype)
        weights = self.weights[at.to(self.weights.device)].cpu()
        h = self.h[self._rows_of(at).to(self.h.device)].cpu()
        return expected.reduced([[h]], [[of(self.down)]], numbered, weights, dtype=dtype)

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """By expert, then by token, as the judge has them."""
        rows = self.rows.of_tokens().cpu()[tokens].flatten()
        return rows.sort().values

    def check(self, name: str, half: str, found: Tensor, bound: Bounded) -> None:
        at = self._sample(self.layer.tokens)
        picked = self._rows_of(at) if half == "up" else at
        bound.check(found[picked.to(found.device)], name)
