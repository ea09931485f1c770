"""Column and row layers give nn.Linear's values and gradients, for any sizes, in every mode, on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, close_parameters, mine, sequence_sizes, tp_mesh, whole
from tpkernels.nn import ColumnParallelLinear, ColumnParallelLinears, RowParallelLinear, use_main_grads
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = (1, 2, 3)
HIDDEN = (8, 515, 3)  # 515 divides by none of 2, 3, 4; of 3, the fourth rank has nothing


class Reference(nn.Module):
    """Column then row, in plain torch, with the names of the parallel modules."""

    def __init__(self, width: int, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias, dtype=dtype)


def chain_equals_linears(
    hidden: int, sequence_parallel: bool, bias: bool, dtype: torch.dtype, sequence: int, dim: int, save: bool
) -> None:
    torch.manual_seed(hidden)
    mesh = tp_mesh()
    reference = Reference(7, hidden, bias, dtype)
    up = ColumnParallelLinear.from_linear(
        reference.up,
        mesh,
        activation="gelu",
        sequence_parallel=sequence_parallel,
        sequence_dim=dim,
        save_gathered=save,
    )
    down = RowParallelLinear.from_linear(reference.down, mesh, sequence_parallel=sequence_parallel, sequence_dim=dim)
    parallel = nn.ModuleDict({"up": up, "down": down})
    x = torch.randn((2, sequence, 7) if dim == -2 else (sequence, 2, 7), dtype=dtype, requires_grad=True)
    g = torch.randn_like(x)
    expected = reference.down(nn.functional.gelu(reference.up(x)))
    expected.backward(g)
    assert x.grad is not None
    if sequence_parallel:
        sizes = sequence_sizes(sequence)
        x_r, g_r = mine(x, dim), mine(g, dim)
        y = down(up(x_r, shard_sizes=sizes), shard_sizes=sizes)
        y.backward(g_r)
        assert x_r.grad is not None
        close(y, mine(expected, dim), "y")
        close(x_r.grad, mine(x.grad, dim), "dx")
    else:
        x_r = x.detach().clone().requires_grad_()
        y = down(up(x_r))
        y.backward(g)
        assert x_r.grad is not None
        close(y, expected, "y")
        close(x_r.grad, x.grad, "dx")
    close_parameters(parallel, reference)


@pytest.mark.sample(5)
@pytest.mark.parametrize("world", (*WORLDS, 4))
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_column_and_a_row_layer_equal_two_linears(
    ranks: Pools, world: int, hidden: int, sequence_parallel: bool
) -> None:
    arguments = hidden, sequence_parallel, True, torch.float64, 9, -2, False
    ranks(world).run(chain_equals_linears, *arguments, timeout=LIMIT_S)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("bias", "dtype", "sequence", "dim", "save"),
    [
        (False, torch.float64, 9, -2, False),
        (True, torch.float32, 9, -2, True),
        (True, torch.float64, 1, -2, False),  # fewer rows than ranks
        (True, torch.float64, 10, 0, True),
        (False, torch.float32, 10, 0, False),
    ],
)
def test_every_option_of_sequence_parallel_layers_keeps_the_values(
    ranks: Pools, world: int, bias: bool, dtype: torch.dtype, sequence: int, dim: int, save: bool
) -> None:
    ranks(world).run(chain_equals_linears, 13, True, bias, dtype, sequence, dim, save, timeout=LIMIT_S)


def gathered_output_equals_linear(features: int, sequence_parallel: bool) -> None:
    torch.manual_seed(1)
    mesh = tp_mesh()
    linear = nn.Linear(5, features, dtype=torch.float64)
    layer = ColumnParallelLinear.from_linear(linear, mesh, sequence_parallel=sequence_parallel, gather_output=True)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(6, features, dtype=torch.float64)
    expected = linear(x)
    expected.backward(g)
    assert x.grad is not None
    x_r = mine(x, 0) if sequence_parallel else x.detach().clone().requires_grad_()
    y = layer(x_r, shard_sizes=sequence_sizes(6) if sequence_parallel else None)
    y.backward(g)
    assert x_r.grad is not None
    close(y, expected, "y")
    close(x_r.grad, mine(x.grad, 0) if sequence_parallel else x.grad, "dx")
    close_parameters(layer, linear)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("features", [3, 11])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gather_output_gives_the_whole_output_on_every_rank(
    ranks: Pools, world: int, features: int, sequence_parallel: bool
) -> None:
    ranks(world).run(gathered_output_equals_linear, features, sequence_parallel, timeout=LIMIT_S)


def several_outputs_equal_linears(sequence_parallel: bool) -> None:
    torch.manual_seed(2)
    mesh = tp_mesh()
    linears = nn.ModuleDict({name: nn.Linear(6, n, dtype=torch.float64) for name, n in (("q", 12), ("k", 7), ("v", 1))})
    parallel = ColumnParallelLinears.from_linears(
        {name: linear for name, linear in linears.items() if isinstance(linear, nn.Linear)},
        mesh,
        sequence_parallel=sequence_parallel,
    )
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = [linears[name](x) for name in ("q", "k", "v")]
    gradients = [torch.randn_like(y) for y in expected]
    torch.autograd.backward(expected, gradients)
    assert x.grad is not None
    x_r = mine(x, 1) if sequence_parallel else x.detach().clone().requires_grad_()
    outputs = parallel(x_r, shard_sizes=sequence_sizes(5) if sequence_parallel else None)
    rank, world = mesh.get_local_rank(), mesh.size()
    parts = []
    for y, reference, gradient in zip(outputs, expected, gradients, strict=True):
        sizes = chunk_sizes(reference.shape[-1], world)
        start = offsets(sizes)[rank]
        close(y, reference.narrow(-1, start, sizes[rank]), "y")
        parts.append(gradient.narrow(-1, start, sizes[rank]))
    torch.autograd.backward(outputs, parts)
    assert x_r.grad is not None
    close(x_r.grad, mine(x.grad, 1) if sequence_parallel else x.grad, "dx")
    close_parameters(parallel, linears)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_several_layers_on_one_input_equal_separate_linears(ranks: Pools, world: int, sequence_parallel: bool) -> None:
    ranks(world).run(several_outputs_equal_linears, sequence_parallel, timeout=LIMIT_S)


def new_layers_equal_linear_under_one_seed(build: str) -> None:
    mesh = tp_mesh()
    torch.manual_seed(7)
    linear = nn.Linear(9, 10)
    torch.manual_seed(7)
    layer = ColumnParallelLinear(9, 10, mesh) if build == "column" else RowParallelLinear(9, 10, mesh)
    assert layer.weight.placements == (Shard(0) if build == "column" else Shard(1),)
    assert layer.bias is not None
    assert layer.bias.placements == (Shard(0) if build == "column" else Replicate(),)
    for _ in range(2):
        assert torch.equal(whole(layer.weight), linear.weight)
        assert torch.equal(whole(layer.bias), linear.bias)
        with torch.no_grad():
            layer.weight.zero_()
        torch.manual_seed(7)
        layer.reset_parameters()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("build", ["column", "row"])
def test_a_new_layer_has_the_weights_of_a_linear_made_under_the_same_seed(ranks: Pools, world: int, build: str) -> None:
    ranks(world).run(new_layers_equal_linear_under_one_seed, build, timeout=LIMIT_S)


def from_linear_leaves_the_linear_alone() -> None:
    mesh = tp_mesh()
    linear = nn.Linear(5, 9, dtype=torch.bfloat16).eval()
    linear.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    for layer in (ColumnParallelLinear.from_linear(linear, mesh), RowParallelLinear.from_linear(linear, mesh)):
        assert layer.weight.dtype == torch.bfloat16
        assert not layer.weight.requires_grad
        assert layer.bias is not None and layer.bias.requires_grad
        assert not layer.training
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
        local = layer.weight.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * 2, "more than this rank's part is kept"
    assert all(torch.equal(before[name], tensor) for name, tensor in linear.state_dict().items())


@pytest.mark.parametrize("world", [1, 3])
def test_from_linear_copies_its_part_and_leaves_the_linear_alone(ranks: Pools, world: int) -> None:
    ranks(world).run(from_linear_leaves_the_linear_alone, timeout=LIMIT_S)


def a_group_and_larger_meshes_work() -> list[str]:
    mesh = tpk.init(tp=1, dp=2)
    torch.manual_seed(0)
    one = ColumnParallelLinear(4, 6, mesh)  # its "tp" axis has one rank
    assert one.weight.to_local().shape == (6, 4)
    two = ColumnParallelLinear(4, 6, torch.distributed.group.WORLD)
    assert two.weight.to_local().shape == (3, 4)
    twin = RowParallelLinear(4, 6, torch.distributed.group.WORLD)  # a mesh of its own, equal to the other one
    two(torch.ones(2, 4)).sum().backward()
    twin(torch.ones(2, 2)).sum().backward()
    norm = nn.utils.get_total_norm([p.grad for p in (*two.parameters(), *twin.parameters()) if p.grad is not None])
    assert float(whole(norm)) == pytest.approx((60 * 2.0**2) ** 0.5)  # two weights of 24 and two biases of 6, each 2
    return [repr(one), repr(two)]


def test_a_process_group_or_the_tp_axis_of_a_mesh_is_a_group(ranks: Pools) -> None:
    one, two = ranks(2).run(a_group_and_larger_meshes_work, timeout=LIMIT_S)[0]
    assert "shards=6" in one
    assert "shards=3/3" in two


def errors(what: str) -> None:
    mesh = tp_mesh()
    if what == "unit":
        ColumnParallelLinear(640, 640, mesh, unit=60)
    elif what == "unit of input":
        RowParallelLinear(640, 640, mesh, unit=60)
    elif what == "activation":
        ColumnParallelLinear(4, 4, mesh, activation="tanh")
    elif what == "implementation":
        RowParallelLinear(4, 4, mesh, implementation="fast")
    elif what == "features":
        ColumnParallelLinear(4, 0, mesh)
    elif what == "group":
        ColumnParallelLinear(4, 4, "tp")  # type: ignore[arg-type]
    elif what == "axes":
        shape = (1, torch.distributed.get_world_size())
        RowParallelLinear(4, 4, torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")))
    elif what == "twice":
        layer = ColumnParallelLinear(4, 4, mesh)
        linear = nn.Linear(4, 4)
        linear.weight = layer.weight
        ColumnParallelLinear.from_linear(linear, mesh)
    elif what == "input":
        RowParallelLinear(6, 4, mesh)(torch.ones(2, 6))
    elif what == "column input":
        ColumnParallelLinear(6, 4, mesh)(torch.ones(2, 5))
    elif what == "sizes":
        ColumnParallelLinear(6, 4, mesh)(torch.ones(2, 6), shard_sizes=[1, 1, 1])
    elif what == "names":
        ColumnParallelLinears(6, {"forward": 4}, mesh)
    elif what == "no names":
        ColumnParallelLinears(6, {}, mesh)
    elif what == "widths":
        ColumnParallelLinears.from_linears({"a": nn.Linear(3, 2), "b": nn.Linear(4, 2)}, mesh)
    elif what == "units":
        ColumnParallelLinears(6, {"q": 4}, mesh, unit={"k": 2})


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unit", r"out_features \(640\) must be a multiple of unit \(60\)"),
        ("unit of input", r"in_features \(640\) must be a multiple of unit \(60\)"),
        ("activation", "activation must be None or one of .*'tanh'"),
        ("implementation", "implementation.*fast"),
        ("features", "out_features must be at least 1, got 0"),
        ("group", "group must be a ProcessGroup or a DeviceMesh, got str"),
        ("axes", "pass one axis"),
        ("twice", "is a DTensor already"),
        ("input", r"RowParallelLinear\(6, 4\) takes 2 features on rank . of 3, got x of shape \(2, 6\)"),
        ("column input", r"ColumnParallelLinear\(6, 4\) takes 6 features"),
        ("sizes", r"shard_sizes \(\[1, 1, 1\]\) cuts a sequence: it needs sequence_parallel=True"),
        ("names", "'forward' cannot name an output"),
        ("no names", "at least one output"),
        ("widths", "same number of features, got {'a': 3, 'b': 4}"),
        ("units", r"unit names \['k'\], but the outputs are \['q'\]"),
    ],
)
def test_bad_arguments_are_refused_on_every_rank_with_names_and_values(ranks: Pools, what: str, message: str) -> None:
    for error in ranks(3).run(errors, what, return_exceptions=True, timeout=LIMIT_S):
        assert isinstance(error, ValueError), error
        with pytest.raises(ValueError, match=message):
            raise error


class Turned(nn.Module):
    """A layer with a weight ``[in, out]``, as GPT-2 has them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(linear.weight.detach().t().contiguous()),
            nn.Parameter(linear.bias.detach()),
        )


def without_places(parameter: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """The whole of a parameter with a dimension ``dim`` for units, which become features."""
    ranks = whole(parameter).chunk(len(sizes), dim)
    held = [part.narrow(dim, 0, size) for part, size in zip(ranks, sizes, strict=True)]
    for part, size in zip(ranks, sizes, strict=True):
        assert not part.narrow(dim, size, part.shape[dim] - size).any(), "places without a unit stay zero"
    return torch.cat(held, dim).flatten(dim, dim + 1)


def units_stay_together(turned: bool, units: int) -> None:
    """Of 4 features, which ``torch.chunk`` of the features would cut: 10 are 4, 4, 2 or 3, 3, 3, 1; one more than
    there are ranks is two on the first."""
    mesh = tp_mesh()
    rank, world = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(1)
    reference = Reference(7, 4 * units, True, torch.float64)
    up, down = (Turned(linear) if turned else linear for linear in (reference.up, reference.down))
    columns = ColumnParallelLinear.from_linear(up, mesh, unit=4)
    rows = RowParallelLinear.from_linear(down, mesh, unit=4)
    sizes = [2] + [1] * (world - 1) if units == world + 1 else list(chunk_sizes(units, world))
    places = sizes[0] * world if units == world + 1 else units
    assert columns.shard_sizes == rows.shard_sizes == tuple(4 * size for size in sizes)
    assert columns.weight.shape == ((7, places, 4) if turned else (places, 4, 7)) and columns.bias is not None
    assert columns.bias.shape == (places, 4) and rows.weight.shape == ((places, 4, 7) if turned else (7, places, 4))
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    x_too, g = x.detach().clone().requires_grad_(), torch.randn(5, 7, dtype=torch.float64)
    hidden = columns(x_too)
    close(hidden, reference.up(x).split([4 * size for size in sizes], -1)[rank], "this rank's units")
    y, expected = rows(hidden.tanh()), reference.down(reference.up(x).tanh())
    close(y, expected, "y")
    with torch.no_grad():
        for _ in range(2):  # the second time by the short way
            close(rows(columns(x_too.detach()).tanh()), expected, "y without gradients")
    y.backward(g)
    expected.backward(g)
    assert x.grad is not None and x_too.grad is not None
    close(x_too.grad, x.grad, "dx")
    for layer, linear in ((columns, reference.up), (rows, reference.down)):
        assert linear.weight.grad is not None and layer.bias is not None
        dim = 1 if (layer is rows) is not turned else 0
        each = sizes if places > units else [sum(sizes)]
        dw = without_places(layer.weight.grad, dim, each)
        close(dw.t() if turned else dw, linear.weight.grad, "dw")
        db = whole(layer.bias.grad) if layer is rows else without_places(layer.bias.grad, 0, each)
        close(db, whole(linear.bias.grad), "db")
    gathered = ColumnParallelLinear.from_linear(up, mesh, unit=4, gather_output=True)
    close(gathered(x), reference.up(x), "gathered")
    torch.manual_seed(3)
    gathered.reset_parameters()
    torch.manual_seed(3)
    fresh = nn.Linear(7, 4 * units, dtype=torch.float64)
    close(gathered(x), fresh(x), "after reset_parameters")
    split = RowParallelLinear.from_linear(down, mesh, unit=4, split_input=True)
    close(split(reference.up(x).tanh()), expected, "split input")
    if not turned:
        weight: Any = columns.weight
        weight.grad = None
        use_main_grads(columns, dtype=torch.float64)
        columns(x_too.detach()).sum().backward()
        assert weight.grad is None, "the GEMM, or a hook, added to main_grad"
        held = weight.main_grad.to_local()[: sizes[rank]]
        close(held, x.detach().sum(0).expand(held.shape), "main_grad")


def units_in_both_layouts() -> None:
    for turned in (False, True):
        for units in (10, tp_mesh().size() + 1):
            units_stay_together(turned, units)


@pytest.mark.parametrize("world", [3, 4])
def test_units_that_do_not_divide_stay_together(ranks: Pools, world: int) -> None:
    ranks(world).run(units_in_both_layouts, timeout=LIMIT_S)


def bias_on_every_rank() -> None:
    """The fault: every rank adds the bias before the sum."""
    torch.manual_seed(0)
    mesh = tp_mesh()
    linear = nn.Linear(6, 4, dtype=torch.float64)
    layer = RowParallelLinear.from_linear(linear, mesh)
    x = torch.randn(3, 6, dtype=torch.float64)
    part = x.split(list(layer.shard_sizes), -1)[mesh.get_local_rank()]
    close(layer(part), linear(x), "the layer")
    assert layer.bias is not None
    wrong = tpk.all_reduce(nn.functional.linear(part, layer.weight.to_local(), layer.bias.to_local()), mesh)
    close(wrong, linear(x), "the faulty layer")


def test_the_comparison_catches_a_bias_added_on_every_rank(ranks: Pools) -> None:
    error = ranks(2).run(bias_on_every_rank, return_exceptions=True, timeout=LIMIT_S)[0]
    assert isinstance(error, AssertionError)
    assert "the faulty layer: differs by" in str(error)
