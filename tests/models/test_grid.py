"""Every family, in every way it is used, against the unsharded model: forward, loss, every gradient, 20 steps of AdamW.

The whole grid (``--full``) is that of :mod:`tests.models.grid`; ``SLICE`` is what runs otherwise, and
``benchmarks/values.py`` runs and records it cell by cell.  The bound is that of :mod:`tpkernels.verification.bounds`;
the last tests show that it catches what must be caught.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tests.models.grid import WORLDS, Cell, Reference, Runs, grid, groups, reference_of, run_group, worst_of
from tests.nn.reference import LIMIT_S
from tpkernels.nn import ColumnParallelLinear, RowParallelLinear
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

SLICE = {
    3: [Cell("qwen2", True, "bf16", "train")],
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.slow("8 s; test_models.py compares each family once")
def test_every_family_is_as_exact_as_the_unsharded_model(ranks: Pools, world: int, full: bool) -> None:
    wrong = {}
    for group in groups(grid() if full else SLICE.get(world, [])):
        results = ranks(world).run(run_group, group, reference_of(group), timeout=3 * LIMIT_S)
        for cell, mine in zip(group, zip(*results, strict=True), strict=True):
            worst = {key: value for key, value in worst_of(mine).items() if not value <= FACTOR}
            if worst:
                wrong[cell] = dict(list(worst.items())[:3])
    assert not wrong, wrong


# ---------------------------------------------------------------- what the bound catches


def _missing_all_reduce(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if isinstance(m, RowParallelLinear))
    layer.forward = lambda x: x @ layer._local_parts()[1].t() + layer.bias.to_local()  # type: ignore[method-assign, operator]


def _bias_added_twice(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if isinstance(m, RowParallelLinear))

    def hook(module: nn.Module, args: object, y: Tensor) -> Tensor:
        return y + module.bias.to_local()  # type: ignore[operator, union-attr]

    hook.takes_parts = True  # type: ignore[attr-defined]
    layer.register_forward_hook(hook)


def _wrong_head(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if isinstance(m, CopiedHeadsLinear))
    real = layer._rows
    layer._rows = lambda p, mesh: None if p is None else real(p, mesh).roll(1, 0)  # type: ignore[method-assign, union-attr]


def _no_sum_of_gradients(model: nn.Module) -> None:
    """The gradient of a whole x that columns read stays each rank's own."""
    layer = next(m for m in model.modules() if isinstance(m, ColumnParallelLinear) and not m.gather_output)
    layer.forward = lambda x: torch.nn.functional.linear(  # type: ignore[method-assign]
        x, layer._local_parts()[1], None if layer.bias is None else layer.bias.to_local()
    )


FAULTS: list[tuple[str, Callable[[nn.Module], None]]] = [
    ("gpt2", _missing_all_reduce),
    ("gpt2", _bias_added_twice),
    ("qwen2", _wrong_head),
    ("opt", _no_sum_of_gradients),
]


def faults(dtype: str, references: list[Reference]) -> list[float]:
    """The worst that each fault does."""
    cells = [Cell(name, False, dtype, "eager") for name, _ in FAULTS]
    spoils = [spoil for _, spoil in FAULTS]
    runs = zip(cells, references, spoils, strict=True)
    return [max(Runs(cell, reference, spoil).run(cell.mode).values()) for cell, reference, spoil in runs]


@pytest.mark.parametrize("dtype", ["bf16"])
def test_the_bound_catches_a_missing_sum_a_bias_added_twice_and_a_wrong_head(
    ranks: Pools, dtype: str, full: bool
) -> None:
    if not full:
        pytest.skip("--full: four models more")
    references = [reference_of([Cell(name, False, dtype, "eager")]) for name, _ in FAULTS]
    for rank in ranks(3).run(faults, dtype, references, timeout=2 * LIMIT_S):
        assert all(worst > 1.5 * FACTOR for worst in rank), rank


def _gathers_its_residual(model: nn.Module) -> None:
    """As DTensor does by itself where two that it adds are cut differently: values stay right."""

    def hook(module: nn.Module, args: object, y: DTensor) -> DTensor:
        return y.redistribute(placements=[Replicate()]).redistribute(placements=y.placements)

    norm = next(m for name, m in model.named_modules() if name.endswith("layers.1.final_layer_norm"))
    norm.register_forward_hook(hook)


def communication_that_no_plan_lists(reference: Reference) -> str:
    with pytest.raises(AssertionError) as caught:
        Runs(Cell("opt", True, "fp32", "train"), reference, _gathers_its_residual).run("train")
    return str(caught.value)


def test_a_residual_that_dtensor_gathers_is_caught(ranks: Pools) -> None:
    reference = reference_of([Cell("opt", True, "fp32", "eager")])
    assert all("all_gather" in said for said in ranks(2).run(communication_that_no_plan_lists, reference))
