"""Each row of the tables about torch and Megatron in docs/migration.md runs: theirs and ours, on the same numbers.

Weights and inputs are small integers, so that sums are exact in every order and results are compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.integrations import styles
from tpkernels.testing.payload import integer_payload
from tpkernels.testing.spawn import Pools

PAGE = Path(__file__).resolve().parents[2] / "docs/migration.md"
ROUNDINGS = 64
"""Within so many, two orders of adding up a loss of 8 tokens and 12 classes agree."""

Row = Callable[[DeviceMesh], None]


def same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and bool((found == expected).all()), (found, expected)


def near(found: Tensor, expected: Tensor) -> None:
    """Losses, in the precision of ``found``."""
    limit = ROUNDINGS * torch.finfo(found.dtype).eps * (1 + expected.abs())
    assert bool(((found - expected).abs() <= limit).all()), (found, expected)


def numbers(*shape: int, name: str = "x") -> Tensor:
    return integer_payload(shape, torch.float32, name=name)


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(numbers(*parameter.shape, name=name))
    return model


def mlp(hidden: int = 12) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 6)))


def local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def linear(theirs: Mapping[str, Any], ours: Any, mesh: DeviceMesh) -> None:
    """Two linears, cut by torch's styles and by ours: the same parts of the weights, and the unsharded result."""
    x = numbers(4, 6)
    stock, mine = parallelize_module(mlp(), mesh, theirs), tpk.parallelize(mlp(), mesh, ours)
    same(local(stock(x)), mlp()(x))
    same(local(mine(x)), mlp()(x))
    for a, b in zip(stock.parameters(), mine.parameters(), strict=True):
        same(local(a), local(b))


# ---------------------------------------------------------------- torch


def mesh_of_torch(mesh: DeviceMesh) -> None:
    theirs = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("tp",))
    assert tpk.init().mesh_dim_names == ("dp", "tp")
    same(tpk.parallelize(mlp(), theirs)(numbers(4, 6)), mlp()(numbers(4, 6)))


def a_plan(mesh: DeviceMesh) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    linear(plan, plan, mesh)


def found_plan(mesh: DeviceMesh) -> None:
    linear({"0": ColwiseParallel(), "2": RowwiseParallel()}, "auto", mesh)
    plan = tpk.make_plan(mlp(), mesh)
    assert [type(plan[name].style) for name in ("0", "2")] == [tpk.sharding.Column, tpk.sharding.Row]


def vocabulary(mesh: DeviceMesh) -> None:
    ids = torch.arange(8).view(2, 4)

    def table() -> nn.Module:
        return filled(nn.Sequential(nn.Embedding(8, 6), nn.ReLU()))

    stock = parallelize_module(table(), mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    for style in ("vocabulary", RowwiseParallel()):
        mine = tpk.parallelize(table(), mesh, {"0": style})
        same(local(mine[0].weight), local(stock[0].weight))
        same(mine(ids), table()(ids))
    same(local(stock(ids)), table()(ids))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


def norms(mesh: DeviceMesh) -> None:
    x, rank = numbers(2, 4, 6), mesh.get_local_rank()
    expected = nn.LayerNorm(6)(x)
    stock = parallelize_module(nn.LayerNorm(6), mesh, SequenceParallel())
    same(local(stock(x.chunk(2, 1)[rank])), expected.chunk(2, 1)[rank])
    model = nn.Sequential(nn.LayerNorm(6))
    tpk.parallelize(model, mesh, {"0": tpk.sharding.Replicate(sequence_parallel=True)})
    part = model(x.chunk(2, 1)[rank])
    same(local(part), expected.chunk(2, 1)[rank])
    part.sum().backward()
    same(local(dict(model.named_parameters())["0.bias"].grad), torch.full((6,), 8.0))  # of all ranks' rows
    blocks = nn.Sequential(Block(), Block())
    assert tpk.make_plan(blocks, mesh, example_inputs=numbers(2, 4, 6), sequence_parallel=True).sequence_blocks


def no_counterpart(mesh: DeviceMesh) -> None:
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    with pytest.raises(ValueError, match="must be one of"):
        tpk.parallelize(mlp(), mesh, {"0": style})
    mine = tpk.parallelize(mlp(), mesh, {"0": "column"})
    assert type(mine[0](numbers(4, 6))) is Tensor and mine[0](numbers(4, 6)).shape == (4, 6)


def losses(mesh: DeviceMesh) -> None:
    logits, target = torch.linspace(-2, 2, 96, dtype=torch.float64).view(8, 12).sin(), torch.arange(8)
    part = logits.chunk(2, -1)[mesh.get_local_rank()].contiguous()
    with loss_parallel():
        theirs = F.cross_entropy(DTensor.from_local(part, mesh, [Shard(-1)]), target)
    near(local(theirs), F.cross_entropy(logits, target))
    near(tpk.nn.vocab_parallel_cross_entropy(part, target, mesh), F.cross_entropy(logits, target))


def the_same_call(mesh: DeviceMesh) -> None:
    x, model = numbers(4, 6), mlp()
    parallelize_module(model, mesh, {"0": styles.ColumnParallel(), "2": styles.RowParallel()})
    assert isinstance(model[0], tpk.nn.ColumnParallelLinear)  # type: ignore[index]
    same(local(model(x)), mlp()(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.wide, self.back = 4, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.wide(x).view(*x.shape[:-1], self.num_heads, -1)
        y: Tensor = self.back(heads.relu().flatten(-2))
        return y


def heads(mesh: DeviceMesh) -> None:
    x, model = numbers(2, 3, 8), filled(Heads())
    expected = model(x)
    tpk.parallelize(model, mesh, example_inputs=x)
    assert model.num_heads == 2 and local(model.wide.weight).shape == (4, 8)
    same(model(x), expected)


def uneven(mesh: DeviceMesh) -> None:
    x, model = numbers(4, 6), tpk.parallelize(mlp(13), mesh)
    assert len(local(next(iter(model.parameters())))) == (7, 6)[mesh.get_local_rank()]
    same(model(x), mlp(13)(x))


TORCH: dict[str, Row] = {
    'init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))': mesh_of_torch,
    "parallelize_module(model, mesh, plan)": a_plan,
    "a plan written by hand": found_plan,
    "ColwiseParallel(), RowwiseParallel()": partial(
        linear, {"0": ColwiseParallel(), "2": RowwiseParallel()}, {"0": "column", "2": "row"}
    ),
    "ColwiseParallel(output_layouts=Replicate())": partial(
        linear, {"0": ColwiseParallel(output_layouts=Replicate())}, {"0": "column_gather", "2": "replicate"}
    ),
    "RowwiseParallel(input_layouts=Replicate())": partial(
        linear, {"2": RowwiseParallel(input_layouts=Replicate())}, {"0": "replicate", "2": "row_split"}
    ),
    "RowwiseParallel(input_layouts=Replicate()) of an embedding": vocabulary,
    "SequenceParallel()": norms,
    "PrepareModuleInput, PrepareModuleOutput": no_counterpart,
    "loss_parallel()": losses,
    "the same call with other styles": the_same_call,
    "changing num_heads by hand": heads,
    "sizes that do not divide": uneven,
}


# ---------------------------------------------------------------- Megatron


def pair(kind: str, mesh: DeviceMesh, given: Mapping[str, Any], options: Mapping[str, Any], **config: Any) -> None:
    """A layer of Megatron and ours with its weight: the same bits."""
    from megatron.core import tensor_parallel

    from tests.integrations.megatron import models

    rank, sequence = mesh.get_local_rank(), config.get("sequence_parallel", False)
    made = {"config": models.config(2, **config), "init_method": nn.init.ones_, "bias": True, **given}
    theirs = filled(getattr(tensor_parallel, f"{kind}ParallelLinear")(8, 8, skip_bias_add=False, **made))
    ours = getattr(tpk.nn, f"{kind}ParallelLinear")(8, 8, mesh, sequence_parallel=sequence, **options)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            local(a).copy_(b)
    x = numbers(4, 2, 8)  # [S, B, H]
    if kind == "Row" and made.get("input_is_parallel"):
        x = x.chunk(2, -1)[rank].contiguous()
    elif kind == "Column" and sequence:
        x = x.chunk(2, 0)[rank].contiguous()
    (y, bias), mine = theirs(x), ours(x)
    assert bias is None and isinstance(mine, Tensor)
    same(local(mine), y)


def sequence(mesh: DeviceMesh) -> None:
    own = {"sequence_dim": 0}
    pair("Column", mesh, {"gather_output": False}, own, sequence_parallel=True)
    pair("Row", mesh, {"input_is_parallel": True}, own, sequence_parallel=True)


def rows(mesh: DeviceMesh) -> None:
    pair("Row", mesh, {"input_is_parallel": True}, {})
    pair("Row", mesh, {"input_is_parallel": False}, {"split_input": True})


def megatron_groups(mesh: DeviceMesh) -> None:
    from megatron.core import parallel_state

    assert parallel_state.get_tensor_model_parallel_world_size() == 2 == tpk.init(tp=2)["tp"].size()


def megatron_table(mesh: DeviceMesh) -> None:
    from megatron.core import tensor_parallel

    from tests.integrations.megatron import models

    theirs = filled(tensor_parallel.VocabParallelEmbedding(12, 6, init_method=nn.init.ones_, config=models.config(2)))
    ours = tpk.nn.VocabParallelEmbedding(12, 6, mesh)
    with torch.no_grad():
        local(ours.weight).copy_(theirs.weight)
    ids = torch.arange(12).view(2, 6)
    same(local(ours(ids)), theirs(ids))


def megatron_loss(mesh: DeviceMesh) -> None:
    from megatron.core import tensor_parallel

    logits, target = torch.linspace(-2, 2, 96, dtype=torch.float64).view(8, 12).sin(), torch.arange(8)
    part = logits.chunk(2, -1)[mesh.get_local_rank()].contiguous()
    theirs = tensor_parallel.vocab_parallel_cross_entropy(part.clone(), target).mean()
    near(theirs, F.cross_entropy(logits, target))
    near(tpk.nn.vocab_parallel_cross_entropy(part, target, mesh), F.cross_entropy(logits, target))


def overlap(mesh: DeviceMesh) -> None:
    from megatron.core.model_parallel_config import ModelParallelConfig

    assert "tp_comm_overlap" in {field.name for field in dataclasses.fields(ModelParallelConfig)}
    x, layer = numbers(4, 6), filled(nn.Linear(6, 8))
    ways = [tpk.nn.ColumnParallelLinear.from_linear(layer, mesh, implementation=one) for one in ("auto", "unfused")]
    same(local(ways[0](x)), local(ways[1](x)))


def main_grads(mesh: DeviceMesh) -> None:
    model, x = tpk.parallelize(mlp(), mesh), numbers(4, 6)
    tpk.nn.use_main_grads(model)
    for _ in range(2):
        model(x).sum().backward()
    whole = mlp()
    whole(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    same(local(model[2].bias.main_grad), 2 * whole[2].bias.grad)  # type: ignore[index,union-attr,operator]


def checkpoint(mesh: DeviceMesh) -> None:
    saved = tpk.full_state_dict(tpk.parallelize(mlp(), mesh))
    mlp().load_state_dict(saved, strict=True)
    assert {name: one.shape for name, one in saved.items()} == {n: one.shape for n, one in mlp().state_dict().items()}


def unpadded(mesh: DeviceMesh) -> None:
    from megatron.core import tensor_parallel

    from tests.integrations.megatron import models

    with pytest.raises(AssertionError, match="divisible"):
        tensor_parallel.VocabParallelEmbedding(11, 6, init_method=nn.init.ones_, config=models.config(2))
    table = filled(nn.Embedding(11, 6))
    same(local(tpk.nn.VocabParallelEmbedding.from_embedding(table, mesh)(torch.arange(11))), table(torch.arange(11)))


def skipped_bias(mesh: DeviceMesh) -> None:
    options: dict[str, Any] = {"skip_bias_add": True}
    with pytest.raises(TypeError, match="skip_bias_add"):
        tpk.nn.RowParallelLinear(8, 8, mesh, **options)
    assert tpk.nn.RowParallelLinear(8, 8, mesh, bias=False).bias is None


MEGATRON: dict[str, Row] = {
    "initialize_model_parallel(4)": megatron_groups,
    "ColumnParallelLinear(..., gather_output=False)": lambda mesh: pair("Column", mesh, {"gather_output": False}, {}),
    "RowParallelLinear(..., input_is_parallel=True)": rows,
    "VocabParallelEmbedding": megatron_table,
    "vocab_parallel_cross_entropy": megatron_loss,
    "--sequence-parallel": sequence,
    "--tp-comm-overlap": overlap,
    "main_grad, gradient_accumulation_fusion": main_grads,
    "a checkpoint per rank (mp_rank_00)": checkpoint,
    "vocabulary padded to a multiple of the ranks": unpadded,
    "skip_bias_add": skipped_bias,
}


def of_page(heading: str) -> list[str]:
    """The left cells of a section's table."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| ", section, re.M)
    return [cell.replace("`", "") for cell in cells[1:]]


def run_torch() -> None:
    for row in TORCH.values():
        row(tp_mesh())


def run_megatron() -> None:
    from tests.integrations.megatron import models

    with models.on_cpu(2):
        for row in MEGATRON.values():
            row(tp_mesh())


@pytest.mark.cpu
def test_each_row_has_a_test() -> None:
    assert of_page("From torch's parallelize_module") == list(TORCH)
    assert of_page("From Megatron-LM") == list(MEGATRON)


@pytest.mark.gloo
@pytest.mark.slow("both sides of 13 rows")
def test_each_row_about_torch_runs(ranks: Pools) -> None:
    ranks(2).run(run_torch, timeout=LIMIT_S)


@pytest.mark.gloo
@pytest.mark.slow("both sides of 11 rows; imports Megatron")
def test_each_row_about_megatron_runs(ranks: Pools) -> None:
    pytest.importorskip("megatron.core", reason="the package megatron-core is missing: pip install megatron-core")
    ranks(2).run(run_megatron, timeout=LIMIT_S)
