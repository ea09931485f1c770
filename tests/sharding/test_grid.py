"""Every family, in every way it is used, against the unsharded model: forward, loss, every gradient, 20 steps of AdamW.

The whole grid (``--full``) is families x 2, 3, 4 ranks x residual whole or cut along the sequence x fp32 and bf16 x
eager, compiled, with activation checkpointing; and dropout.  ``SLICE`` is what runs otherwise.  The bound is that of
:mod:`tests.sharding.judge`; the last tests show that it catches what must be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh, whole
from tests.sharding import zoo
from tests.sharding.compare import held_bytes, pieces_of
from tests.sharding.judge import FACTOR, allowed, worst_ratio
from tests.sharding.switches import switch_alike
from tpkernels.nn import ColumnParallelLinear, RowParallelLinear
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

STEPS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HAS_BLOCKS = (*zoo.FAMILIES, *zoo.UNEVEN, "transformer", "transformer 10")
"""Models with a residual that can be cut along the sequence."""
RESIDUAL_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"attention_probs_dropout_prob": 0.0},
    "roberta": {"attention_probs_dropout_prob": 0.0},
    "gpt2": {"attn_pdrop": 0.0},
    "opt": {"attention_dropout": 0.0},
}
"""Families that drop nothing that is cut, given this: their random numbers are the unsharded model's."""


@dataclass(frozen=True)
class Cell:
    """One way to use one model."""

    name: str
    sequence: bool
    dtype: str
    mode: str
    """"train": 20 steps; "compile"; "checkpoint"; "dropout": that of whole activations."""


SLICE = {
    2: [
        Cell("llama", True, "bf16", "train"),
        Cell("bert", True, "bf16", "train"),
        Cell("gpt2", False, "fp32", "train"),
        Cell("llama", True, "fp32", "compile"),
        Cell("t5", True, "fp32", "checkpoint"),
        Cell("bert", False, "fp32", "dropout"),
        Cell("transformer", False, "bf16", "checkpoint"),
    ],
    3: [Cell("qwen2", True, "fp32", "train"), Cell("opt 10", False, "fp32", "train")],
}


def grid() -> list[Cell]:
    cells = []
    for name, sequence, dtype, mode in product(
        (*zoo.FAMILIES, *zoo.UNEVEN, *zoo.PLAIN), (False, True), DTYPES, ("train", "compile", "checkpoint", "dropout")
    ):
        drops = mode == "dropout"
        if (not sequence or name in HAS_BLOCKS) and (not drops or (name in RESIDUAL_DROPOUT and not sequence)):
            cells.append(Cell(name, sequence, dtype, mode))
    return cells


class Runs:
    """The exact, the plain and the parallel model of a cell, all from the same weights."""

    def __init__(self, cell: Cell, spoil: Callable[[nn.Module], None] | None = None) -> None:
        self.cell, dtype = cell, DTYPES[cell.dtype]
        options = {"dropout": 0.3, **RESIDUAL_DROPOUT[cell.name]} if cell.mode == "dropout" else {"dropout": 0.0}
        self.exact, self.plain, self.model = (zoo.build(cell.name, dtype, **options) for _ in range(3))
        self.exact.double()
        self.given, self.given64 = zoo.inputs(cell.name, dtype), zoo.inputs(cell.name, dtype)
        self.given64 = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
                        for k, v in self.given64.items()}  # fmt: skip
        self.plan = tpk.make_plan(self.model, tp_mesh(), sequence_parallel=cell.sequence)
        tpk.parallelize(self.model, tp_mesh(), self.plan)
        if cell.dtype == "bf16":
            switch_alike(self.exact, self.plain, self.model)
        if spoil is not None:
            spoil(self.model)
        self.worst: dict[str, float] = {}

    def nets(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        return [(self.exact, self.given64), (self.plain, self.given), (self.model, self.given)]

    def losses(self) -> list[Tensor]:
        """Forward and backward of all three; notes how far outputs and losses are off."""
        outputs, losses = [], []
        for net, given in self.nets():
            net.zero_grad()
            torch.manual_seed(5)
            y = self._call(net, given)
            outputs.append(y.detach())
            losses.append(y.double().square().mean())
            losses[-1].backward()
        self._judge("output", outputs[2], outputs[0], allowed(outputs[1], outputs[0]))
        plain = losses[1].detach().to(DTYPES[self.cell.dtype])
        self._judge("loss", losses[2], losses[0].detach(), allowed(plain, losses[0]))
        return losses

    def _call(self, net: nn.Module, given: dict[str, Any]) -> Tensor:
        mode = self.cell.mode
        net.train(mode in ("dropout", "checkpoint") and self.cell.name not in zoo.PLAIN)
        if mode == "compile" and net is self.model:
            net = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
        if mode == "checkpoint" and self.cell.name in zoo.PLAIN:
            result: Any = checkpoint(net, *given.values(), use_reentrant=False)
        else:
            if mode == "checkpoint":
                net.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            result = net(**given)
        return zoo.output(result)

    def judge_tensors(self, gradients: bool) -> None:
        """Note how far gradients, or parameters, are off on this rank."""
        plain = dict(self.plain.named_parameters(remove_duplicate=False))
        for name, exact in self.exact.named_parameters(remove_duplicate=False):
            wholes = (exact.grad, plain[name].grad) if gradients else (exact, plain[name])
            if wholes[0] is None or wholes[1] is None:
                continue
            what = f"{'gradient' if gradients else 'parameter'} {name}"
            size = allowed(wholes[1], wholes[0])
            pieces = pieces_of(self.model, name, exact)
            assert pieces, f"{name} is gone"
            for part, cut in pieces:
                tensor: Any = part.grad if gradients else part
                assert tensor is not None, f"{name} has no gradient"
                self._judge(what, tensor.to_local(), cut(wholes[0]), cut(size))

    def _judge(self, what: str, actual: Tensor, exact: Tensor, size: Tensor) -> None:
        self.worst[what] = max(self.worst.get(what, 0.0), worst_ratio(actual, exact.detach(), size))

    def train(self) -> None:
        """20 steps with clipping."""
        # With the usual eps of 1e-8 AdamW makes the rounding of a gradient that is almost 0 a step of full size.
        optimizers = [torch.optim.AdamW(net.parameters(), 3e-3, eps=1e-4) for net, _ in self.nets()]
        for step in range(STEPS):
            self.losses()
            if step == 0:
                self.judge_tensors(gradients=True)
            exact, plain, norm = (whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3)) for net, _ in self.nets())
            self._judge("norm", norm, exact, allowed(plain, exact))
            for optimizer in optimizers:
                optimizer.step()
        self.judge_tensors(gradients=False)


def run(cell: Cell, spoil: Callable[[nn.Module], None] | None = None) -> dict[str, float]:
    """How far off everything is, in units of what is allowed; larger than FACTOR is wrong."""
    torch._dynamo.reset()
    runs = Runs(cell, spoil)
    assert held_bytes(runs.model) == runs.plan.bytes_per_rank[dist.get_rank()]
    if cell.mode == "train":
        runs.train()
    else:
        runs.losses()
        runs.judge_tensors(gradients=True)
    return runs.worst


def run_all(cells: list[Cell]) -> list[dict[str, float]]:
    return [run(cell) for cell in cells]


def worst_of(results: list[dict[str, float]]) -> dict[str, float]:
    """Over ranks; the worst first."""
    keys = {key for result in results for key in result}
    merged = {key: max(result.get(key, 0.0) for result in results) for key in keys}
    return dict(sorted(merged.items(), key=lambda item: -item[1]))


def batches(cells: list[Cell]) -> Iterator[list[Cell]]:
    for start in range(0, len(cells), 8):
        yield cells[start : start + 8]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_family_is_as_exact_as_the_unsharded_model(ranks: Pools, world: int, full: bool) -> None:
    cells = grid() if full else SLICE.get(world, [])
    wrong = {}
    for batch in batches(cells):
        results = ranks(world).run(run_all, batch, timeout=10 * LIMIT_S)
        for cell, mine in zip(batch, zip(*results, strict=True), strict=True):
            worst = {key: value for key, value in worst_of(list(mine)).items() if not value <= FACTOR}
            if worst:
                wrong[cell] = dict(list(worst.items())[:3])
    assert not wrong, wrong


# ---------------------------------------------------------------- what the bound catches


def _missing_all_reduce(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if isinstance(m, RowParallelLinear))
    layer.forward = lambda x: x @ layer._matrix().t() + layer.bias.to_local()  # type: ignore[method-assign, operator]


def _bias_added_twice(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if isinstance(m, RowParallelLinear))
    layer.register_forward_hook(lambda module, args, y: y + module.bias.to_local())  # type: ignore[operator]


def _wrong_head(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if isinstance(m, CopiedHeadsLinear))
    real = layer._rows
    layer._rows = lambda p, mesh: None if p is None else real(p, mesh).roll(1, 0)  # type: ignore[method-assign, union-attr]


def _no_sum_of_gradients(model: nn.Module) -> None:
    """The gradient of a whole x that columns read stays each rank's own."""
    layer = next(m for m in model.modules() if isinstance(m, ColumnParallelLinear) and not m.gather_output)
    layer.forward = lambda x: torch.nn.functional.linear(  # type: ignore[method-assign]
        x, layer._matrix(), None if layer.bias is None else layer.bias.to_local()
    )


FAULTS: list[tuple[str, Callable[[nn.Module], None]]] = [
    ("gpt2", _missing_all_reduce),
    ("gpt2", _bias_added_twice),
    ("qwen2", _wrong_head),
    ("opt", _no_sum_of_gradients),
]


def faults(dtype: str) -> list[float]:
    """The worst that each fault does."""
    return [max(run(Cell(name, False, dtype, "eager"), spoil).values()) for name, spoil in FAULTS]


@pytest.mark.parametrize("dtype", ["bf16"])
def test_the_bound_catches_a_missing_sum_a_bias_added_twice_and_a_wrong_head(ranks: Pools, dtype: str) -> None:
    for rank in ranks(3).run(faults, dtype, timeout=2 * LIMIT_S):
        assert all(worst > 1.5 * FACTOR for worst in rank), rank
