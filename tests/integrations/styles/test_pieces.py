"""Single modules with our styles, on every layout: the values and gradients of the module itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.integrations.styles import ColumnParallel, Replicated, RowParallel, SequenceParallel
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR, bounds_of


def _passed(module: nn.Module, x: Tensor, upstream: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Output and gradients of a module by itself, and the gradient that came from above: the output's cosine."""
    leaf = x.clone().requires_grad_(x.is_floating_point())
    y = module(leaf)
    upstream = torch.cos(3 * y.detach()) if upstream is None else upstream
    y.backward(upstream.to(y.dtype))
    found = {"y": y.detach()} | {f"d{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return found | ({"dx": leaf.grad} if leaf.grad is not None else {}), upstream


def _pieces(off: float = 0.0) -> dict[str, float]:
    """Outputs and gradients of single modules on single layouts, in units of the bound; ``off``: by how much too large
    each output is made."""
    mesh, found = tp_mesh(), {}
    n, rank = mesh.size(), mesh.get_local_rank()
    part = lambda x, dim: x.chunk(n, dim)[rank]  # noqa: E731
    torch.manual_seed(1)
    x = torch.randn(2, 2 * n + 1, 6)
    even = torch.randn(2, 2 * n, 6)
    ids = torch.randint(10, (2, 5))
    whole, cut, last = Replicate(), Shard(1), Shard(2)
    norm, linear, table = nn.LayerNorm(6), nn.Linear(6, 7), nn.Embedding(10, 7)
    wide = nn.Linear(6, 4 * n)
    cases: list[tuple[str, nn.Module, ParallelStyle, Tensor, Any, Placement | None]] = [
        ("norm of a whole", norm, SequenceParallel(input_layouts=whole, output_layouts=whole, use_local_output=True),
         x, x, None),
        ("norm of parts", norm, SequenceParallel(use_local_output=True), even, part(even, 1), cut),
        ("norm to a DTensor", norm, SequenceParallel(output_layouts=whole), even, part(even, 1), whole),
        ("columns", wide, ColumnParallel(), x, x, last),
        ("columns gathered, DTensor", linear, ColumnParallel(output_layouts=whole, use_local_output=False), x, x,
         whole),
        ("columns of parts", wide, ColumnParallel(input_layouts=cut), even, part(even, 1), last),
        ("columns of dimension -2", wide, ColumnParallel(input_layouts=Shard(-2), use_local_output=False), even,
         part(even, 1), last),
        ("rows of a whole", linear, RowParallel(input_layouts=whole, use_local_output=False), x, x, whole),
        ("rows of parts", linear, RowParallel(output_layouts=cut, use_local_output=False), x, part(x, -1), cut),
        ("a table's rows", table, RowParallel(input_layouts=whole, output_layouts=cut, use_local_output=False),
         ids, ids, cut),
        ("a table's columns", table, ColumnParallel(output_layouts=whole), ids, ids, whole),
        ("a table's own columns", table, ColumnParallel(use_local_output=False), ids, ids, last),
        ("replicated", linear, Replicated(use_local_output=False), x, x, whole),
    ]  # fmt: skip
    for name, module, style, given, mine, layout in cases:
        made = copied(module)
        parallelize_module(made, mesh, style)
        exact, upstream = _passed(copied(module).double(), given.double() if given.is_floating_point() else given)
        plain, _ = _passed(copied(module), given, upstream)
        bounds = bounds_of({key: (exact[key], plain[key]) for key in exact}, {})
        own = mine.detach().clone().requires_grad_(mine.is_floating_point())
        y = made(own) * (1 + off)
        assert isinstance(y, DTensor) is not style.use_local_output, name
        if isinstance(y, DTensor):
            assert y.placements == (layout,) and y.shape == exact["y"].shape, (name, y.placements, y.shape)
        mine_of = lambda whole, dim: whole if dim is None else part(whole, dim)  # noqa: E731
        local, dim = y.to_local() if isinstance(y, DTensor) else y, layout.dim if isinstance(layout, Shard) else None
        local.backward(mine_of(upstream, dim).float())
        got: dict[str, tuple[Tensor, int | None]] = {"y": (local, dim)}
        for key, parameter in made.named_parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor) and not isinstance(gradient.placements[0], Partial)
            got[f"d{key}"] = gradient.full_tensor(), None
        if own.grad is not None:
            cut_at = [at for at in range(3) if own.shape[at] != given.shape[at]]
            got["dx"] = own.grad, cut_at[0] if cut_at else None
        assert got.keys() == bounds.keys(), name
        for key, (value, at) in got.items():
            place = None if at is None else (*[slice(None)] * at, _slice(part(torch.arange(exact[key].shape[at]), 0)))
            found[f"{name}: {key}"] = bounds[key].ratio(value, place) / FACTOR
    return found


def _slice(indices: Tensor) -> slice:
    return slice(int(indices[0]), int(indices[-1]) + 1)


FULL = pytest.mark.full("other numbers of ranks")


def copied(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.gloo
@pytest.mark.parametrize("world", [pytest.param(1, marks=FULL), 2, pytest.param(3, marks=FULL)])
def test_every_layout_gives_the_values_and_gradients_of_the_module_itself(ranks: Pools, world: int) -> None:
    for found in ranks(world).run(_pieces, timeout=LIMIT_S):
        assert max(found.values()) <= 1, {name: worst for name, worst in found.items() if not worst <= 1}


@pytest.mark.gloo
def test_outputs_a_hundred_thousandth_too_large_are_noticed_in_every_layout(ranks: Pools) -> None:
    for found in ranks(2).run(_pieces, 1e-5, timeout=LIMIT_S):
        assert all(worst > 1 for name, worst in found.items() if name.endswith(": y")), found
