"""``parallelize``: a plan is applied exactly, or refused with the model as it was."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as PlainReplicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, close_parameters, close_replicas, mine, sequence_sizes, tp_mesh, whole
from tpkernels.errors import FallbackPlanWarning
from tpkernels.nn import ColumnParallelLinear, CopiedHeadsLinear, PackedColumnParallelLinear, RowParallelLinear
from tpkernels.partition import chunk_sizes
from tpkernels.sharding import Column, Replicate, Row
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HIDDEN = 6, 13
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """An embedding tied to the head, two blocks, the second of them used twice, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[1])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def pair() -> tuple[Net, Net, Tensor]:
    torch.manual_seed(4)
    plain = Net().double()
    torch.manual_seed(4)
    return plain, Net().double(), torch.tensor([[1, 2, 3, 10], [0, 5, 1, 1]])


def trains_like_the_plain_model(optimizer_options: dict[str, bool]) -> None:
    plain, model, tokens = pair()
    assert tpk.parallelize(model, tp_mesh(), PLAN) is model
    assert isinstance(model.blocks[0].up, ColumnParallelLinear)
    assert isinstance(model.blocks[1].down, RowParallelLinear)
    assert model.blocks[2] is model.blocks[1]
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizers = [torch.optim.AdamW(net.parameters(), 0.05, **optimizer_options) for net in (plain, model)]
    for _ in range(3):
        norms = []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            net(tokens).square().mean().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
        close(norms[1], norms[0], "norm")
        close_parameters(model, plain)
    close_replicas(model)
    model.eval().requires_grad_(False)
    close(model(tokens), plain(tokens), "y")


EVERY_WORLD = [(world, {}) for world in (1, 2, 3, 4)]
EVERY_OPTIMIZER = [(world, {option: True}) for world in (2, 3) for option in ("foreach", "fused")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("world", "options"), EVERY_WORLD + EVERY_OPTIMIZER)
def test_a_parallelized_model_trains_like_the_plain_one(ranks: Pools, world: int, options: dict[str, bool]) -> None:
    ranks(world).run(trains_like_the_plain_model, options, timeout=LIMIT_S)


class SequenceBlock(nn.Module):
    """Works on what it gets: the whole sequence, or this rank's part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, **sizes: list[int]) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x), **sizes)), **sizes)
        return y


def sequence_parallel_plan(norm: Replicate) -> None:
    torch.manual_seed(4)
    plain = SequenceBlock().double()
    torch.manual_seed(4)
    model = SequenceBlock().double()
    plan = {"up": Column(sequence_parallel=True), "down": Row(sequence_parallel=True), "norm": norm}
    tpk.parallelize(model, tpk.init(), plan)  # the "tp" axis of a mesh of two
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    plain(x).square().sum().backward()
    y = model(mine(x, 1), shard_sizes=sequence_sizes(7))
    y.square().sum().backward()
    close(y, mine(plain(x), 1), "y")
    close_parameters(model, plain)


@pytest.mark.parametrize("world", [2, 3])
def test_norms_between_sequence_parallel_layers_sum_their_gradients(ranks: Pools, world: int) -> None:
    ranks(world).run(sequence_parallel_plan, Replicate(sequence_parallel=True), timeout=LIMIT_S)


def test_a_norm_that_does_not_sum_its_gradients_is_caught(ranks: Pools) -> None:
    error = ranks(2).run(sequence_parallel_plan, Replicate(), return_exceptions=True, timeout=LIMIT_S)[0]
    assert isinstance(error, AssertionError)
    assert "gradient of norm.weight: differs by" in str(error)


def options_reach_the_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 4))
    implementation = "chunked"
    plan = {
        "0": Column(gather_output=True, unit=2, implementation=implementation, save_gathered=True, sequence_dim=0),
        "1": "replicate",
    }
    tpk.parallelize(model, tp_mesh(), plan)
    layer = model[0]
    assert isinstance(layer, ColumnParallelLinear)
    assert layer.gather_output and layer.save_gathered
    assert (layer.unit, layer.implementation, layer.sequence_dim) == (2, implementation, 0)
    assert type(model[1]).__mro__[1] is nn.Linear
    assert model(torch.ones(3, 4)).shape == (3, 4)


def test_options_of_a_style_reach_the_module(ranks: Pools) -> None:
    ranks(2).run(options_reach_the_modules, timeout=LIMIT_S)


def patterns_match_by_parts() -> list[list[str]]:
    found = []
    for pattern in ("a.*", "**.up", "a.[01].up", "**", "a.0.?p"):
        inner = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 4)}), nn.ModuleDict({"up": nn.Linear(4, 4)})])
        model = nn.ModuleDict({"a": inner, "up": nn.Linear(4, 4)})
        style = "column" if pattern.endswith("p") else "replicate"
        tpk.parallelize(model, tp_mesh(), {pattern: style})
        found.append([name for name, module in model.named_modules() if isinstance(module, ColumnParallelLinear)])
    return found


def test_a_star_stays_within_one_part_of_a_name(ranks: Pools) -> None:
    everything = ["a.0.up", "a.1.up", "up"]
    expected = [[], everything, everything[:2], [], everything[:1]]
    assert ranks(2).run(patterns_match_by_parts, timeout=LIMIT_S)[0] == expected


def refused(what: str) -> tuple[str, bool]:
    """The error's text, and whether the model is as it was."""
    mesh = tp_mesh()
    model = Net()
    plan: dict[str, object] = dict(PLAN)
    if what == "nothing":
        plan["blocks.*.upp"] = "column"
    elif what == "nothing near":
        plan["zzz"] = "row"
    elif what == "kind":
        plan["blocks.*.norm"] = "column"
    elif what == "contradiction":
        plan["blocks.0.*"] = "replicate"
    elif what == "shared":
        plan = {"blocks.0.up": "column", "blocks.1.up": "column"}
    elif what == "shared differently":
        plan["blocks.2.up"] = Column(gather_output=True)
        plan["blocks.[01].up"] = plan.pop("blocks.*.up")
    elif what == "tied":
        plan["head"] = "column"
    elif what == "style":
        plan["head"] = "columns"
    elif what == "unit":
        plan = {"blocks.*.up": Column(unit=4)}
    elif what == "implementation":
        plan["blocks.*.down"] = Row(implementation="fast")
    elif what == "hook":
        model.blocks[0].up.register_forward_hook(lambda *_: None)
    elif what == "subclass":
        model.blocks[0].up = nn.modules.linear.NonDynamicallyQuantizableLinear(WIDTH, HIDDEN)
    elif what == "mesh":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    elif what == "ranks":
        plan = tpk.make_plan(Net(), 4)  # type: ignore[assignment]
    elif what == "model":
        plan = tpk.make_plan(Block(), mesh, example_inputs=torch.zeros(2, 3, WIDTH))  # type: ignore[assignment]
    elif what == "word":
        plan = "best"  # type: ignore[assignment]
    elif what == "nothing to shard":
        model, plan = nn.Sequential(nn.LayerNorm(4)), "auto"  # type: ignore[assignment]
    elif what == "twice with auto":
        plan = "auto"  # type: ignore[assignment]
        tpk.parallelize(model, mesh)
    elif what == "twice":
        tpk.parallelize(model, mesh, plan)  # type: ignore[arg-type]
    before = dict(model.named_modules(remove_duplicate=False)), dict(model.named_parameters())
    kinds = {name: type(module) for name, module in before[0].items()}
    try:
        tpk.parallelize(model, mesh, plan)  # type: ignore[arg-type]
    except ValueError as error:
        after = dict(model.named_modules(remove_duplicate=False))
        same = after.keys() == before[0].keys() and all(after[name] is module for name, module in before[0].items())
        same &= kinds == {name: type(module) for name, module in after.items()}
        same &= all(parameter is before[1][name] for name, parameter in model.named_parameters())
        return str(error), same
    return "", True


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", ["'blocks.*.upp' matches no module of Net", "near: ", "blocks.0.up"]),
        ("nothing near", ["'zzz' matches no module of Net", "it has embedding, blocks"]),
        ("kind", ["module 'blocks.0.norm' is a LayerNorm", "column styles are for nn.Linear"]),
        ("contradiction", ["module 'blocks.0.up' matches 'blocks.*.up' with Column(", "'blocks.0.*' with Replicate("]),
        ("shared", ["'blocks.1.up' and 'blocks.2.up' are one module: the plan must name both"]),
        ("shared differently", ["are one module, but the plan gives", "gather_output=True"]),
        ("tied", ["head.weight is tied to that of embedding", "leave 'head' out of the plan"]),
        ("style", ["plan['head'] must be one of ['column', 'row', 'replicate'", "got 'columns'"]),
        ("unit", ["blocks.0.up: out_features (13) must be a multiple of unit (4)"]),
        ("implementation", ["fast"]),
        ("hook", ["module 'blocks.0.up' has hooks"]),
        ("subclass", ["'blocks.0.up' is a NonDynamicallyQuantizableLinear, a subclass or variant of nn.Linear"]),
        ("mesh", ["axes ('a', 'b')", '"tp"']),
        ("ranks", ["this plan is for 4 ranks, the mesh has 2"]),
        ("model", ["this plan is for a Block", "there is no module 'up'"]),
        ("word", ['plan must be "auto"', "got 'best'"]),
        ("nothing to shard", ["nothing to shard: Sequential has no linear, embedding or convolution"]),
        ("twice with auto", ["is a DTensor already", "the model was parallelized before"]),
        ("twice", ["is a DTensor already", "the model was parallelized before"]),
    ],
)
def test_a_plan_that_cannot_be_applied_is_refused_and_the_model_unchanged(
    ranks: Pools, what: str, words: list[str]
) -> None:
    for message, unchanged in ranks(2).run(refused, what, timeout=LIMIT_S):
        assert unchanged
        for word in words:
            assert word in message


class Conv1D(nn.Module):
    """As GPT-2's: a weight ``[in, out]``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def special_layers() -> None:
    """Layers that a plan uses and that are there on their own: transposed, packed, copied heads, split input."""
    mesh, rank, world = tp_mesh(), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    x = torch.randn(5, 6, dtype=torch.float64)
    linear = nn.Linear(6, 14).double()
    conv = Conv1D(linear.weight.detach().t().clone(), linear.bias.detach().clone())
    for layer in (linear, conv):
        mine = x.clone().requires_grad_()
        expected = layer(mine)
        expected.square().sum().backward()
        grad, wanted = mine.grad, layer.weight.grad
        assert grad is not None and wanted is not None

        split = RowParallelLinear.from_linear(layer, mesh, split_input=True)
        mine = x.clone().requires_grad_()
        split(mine).square().sum().backward()
        close(split(x), expected, "split input")
        close(whole(mine.grad), grad, "dx of split input")
        close(whole(split.weight.grad), wanted, "dw of split input")
        close(split(x[0]), expected[0], "a vector")

        packed = PackedColumnParallelLinear.from_linear(layer, mesh, segments=(7, 4, 3))
        mine = x.clone().requires_grad_()
        y = packed(mine)
        parts = [piece.split(list(chunk_sizes(piece.shape[-1], world)), -1) for piece in expected.split((7, 4, 3), -1)]
        close(y, torch.cat([part[rank] for part in parts], -1), "packed")
        y.square().sum().backward()
        close(whole(mine.grad), grad, "dx of packed")
        grads = [whole(part.weight.grad) for part in packed.layers]
        close(torch.cat(grads, 0 if layer is linear else 1), wanted, "dw of packed")

        asked = [(what.shape, what.dtype, what.device, what.numel()) for what in (packed.weight, packed.bias)]
        if asked != [(what.shape, what.dtype, what.device, what.numel()) for what in (layer.weight, layer.bias)]:
            raise AssertionError(f"a packed layer says of its parameters: {asked}")
        with pytest.raises(TypeError, match="packed layer's weight, which has no values"):
            torch.matmul(x, packed.weight)
        with pytest.raises(TypeError, match="packed layer's bias, which has no values"):
            packed.bias.data.norm()

        copied = CopiedHeadsLinear.from_linear(layer, mesh, heads=2, copies=6)
        mine = x.clone().requires_grad_()
        y = copied(mine)
        heads = expected.view(5, 2, 7).repeat_interleave(3, 1)
        count = 6 // world
        close(y, heads[:, rank * count : (rank + 1) * count].reshape(5, -1), "copied heads")
        y.square().sum().backward()
        close(whole(mine.grad), 3 * grad, "dx of copied heads")
        close(whole(copied.weight.grad), 3 * wanted, "dw of copied heads")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_transposed_packed_and_copied_layers_equal_the_plain_one(ranks: Pools, world: int) -> None:
    ranks(world).run(special_layers, timeout=LIMIT_S)


def torch_styles() -> None:
    plain, model, tokens = pair()
    plan = {
        "embedding": RowwiseParallel(input_layouts=PlainReplicate()),
        "head": ColwiseParallel(output_layouts=PlainReplicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": "rowwise",
    }
    tpk.parallelize(model, tp_mesh(), plan)
    assert model.head.weight is model.embedding.weight
    for net in (plain, model):
        net(tokens).square().mean().backward()
    close_parameters(model, plain)


def test_plans_in_the_words_of_torch_and_transformers_keep_tied_weights_tied(ranks: Pools) -> None:
    ranks(3).run(torch_styles, timeout=LIMIT_S)


class Undecided(nn.Module):
    """Asks for the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x) if x.sum().item() > 0 else x.repeat(1, 2)
        return y


def warned_of() -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FallbackPlanWarning)
        tpk.parallelize(Undecided(), tp_mesh())
        tpk.parallelize(nn.Sequential(nn.Linear(6, 12)), tp_mesh())
    return [str(warning.message) for warning in told if issubclass(warning.category, FallbackPlanWarning)]


def test_rank_0_warns_of_a_plan_without_data_flow(ranks: Pools) -> None:
    (message,), nothing = ranks(2).run(warned_of, timeout=LIMIT_S)
    assert message.startswith("Undecided: no data flow: it cannot be traced") and "pass example_inputs" in message
    assert not nothing
