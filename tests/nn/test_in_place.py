"""What a module returns can be written to (``x = layer(h); x += residual``): gradients are those of writing nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, tp_mesh
from tpkernels.nn.shared_input import SharedInput
from tpkernels.partition import chunk_sizes
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

IN, OUT, ROWS = 6, 8, 4
F64 = torch.float64


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def linear() -> nn.Linear:
    return nn.Linear(IN, OUT, dtype=F64)


def attention(**options: Any) -> nn.Module:
    return tpk.nn.ParallelMultiheadAttention.from_attention(
        nn.MultiheadAttention(IN, 2, dtype=F64, **options), tp_mesh()
    )


def column(**options: Any) -> nn.Module:
    return tpk.nn.ColumnParallelLinear(IN, OUT, tp_mesh(), dtype=F64, **options)


def columns(**options: Any) -> nn.Module:
    return tpk.nn.ColumnParallelLinears(IN, {"a": OUT, "b": OUT}, tp_mesh(), dtype=F64, **options)


def row(**options: Any) -> nn.Module:
    return tpk.nn.RowParallelLinear(OUT, IN, tp_mesh(), dtype=F64, **options)


def mlp(**options: Any) -> nn.Module:
    return tpk.nn.ParallelMLP(IN, OUT, tp_mesh(), dtype=F64, **options)


def heads(**options: Any) -> nn.Module:
    return tpk.nn.CopiedHeadsLinear.from_linear(linear(), tp_mesh(), heads=1, copies=dist.get_world_size(), **options)


def packed(**options: Any) -> nn.Module:
    return tpk.nn.PackedColumnParallelLinear.from_linear(linear(), tp_mesh(), segments=(5, 3), **options)


def whole_attention(**options: Any) -> nn.Module:
    return tpk.nn.ParallelAttention(IN, 2, tp_mesh(), dtype=F64, **options)


class Together(nn.Module):
    """Two layers, one after the other, that run as one op."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([column(), column()])
        shared = SharedInput(("a", "b"), list(self.layers))  # type: ignore[arg-type]
        for layer in self.layers:
            layer.shared = shared  # type: ignore[assignment]

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


class OnMesh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(1, -1), mesh_dim_names=("y", "x"))
        self.block = tpk.nn.MeshMLP2D(IN, OUT, mesh, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        part = x.split(chunk_sizes(IN, dist.get_world_size()), -1)[dist.get_rank()]
        y: Tensor = self.block(part)
        return y


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = column()

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.zeros(x.shape[:-1], dtype=torch.int64)
        return tpk.nn.vocab_parallel_linear_cross_entropy(x, self.head, labels, reduction="none")  # type: ignore[arg-type]


def embedding(**options: Any) -> nn.Module:
    return tpk.nn.VocabParallelEmbedding(11, IN, tp_mesh(), dtype=F64, **options)


def features(**options: Any) -> nn.Module:
    return tpk.nn.FeatureParallelEmbedding.from_embedding(nn.Embedding(11, IN, dtype=F64), tp_mesh(), **options)


def ids() -> list[Tensor]:
    return [torch.randint(0, 11, (2, ROWS)), torch.randint(0, 11, (ROWS,))]


def of_rows() -> list[Tensor]:
    return [floats(IN), floats(ROWS, IN), floats(2, ROWS, IN)]


def of_cut_rows() -> list[Tensor]:
    return [floats(ROWS, IN), floats(2, ROWS, IN)]


def of_parts() -> list[Tensor]:
    return [floats(*shape, OUT // dist.get_world_size()) for shape in ((), (ROWS,), (2, ROWS))]


def of_cut_parts() -> list[Tensor]:
    return of_parts()[1:]


def whole_features() -> list[Tensor]:
    return [floats(OUT), floats(ROWS, OUT), floats(2, ROWS, OUT)]


def of_batches() -> list[Tensor]:
    return [floats(2, ROWS, IN)]


sp: dict[str, Any] = {"sequence_parallel": True}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "column": (column, of_rows),
    "column without bias": (lambda: column(bias=False), of_rows),
    "column, gathered": (lambda: column(gather_output=True), of_rows),
    "column, sequence parallel": (lambda: column(**sp, save_gathered=True), of_cut_rows),
    "column, sequence parallel, gathered": (lambda: column(**sp, gather_output=True), of_cut_rows),
    "column with an activation": (lambda: column(activation="gelu"), of_rows),
    "column in units": (lambda: column(unit=4), of_rows),
    "columns": (columns, of_rows),
    "columns, gated": (lambda: columns(activation="swiglu"), of_rows),
    "columns, sequence parallel": (lambda: columns(**sp), of_cut_rows),
    "columns that share their input": (Together, of_rows),
    "packed": (packed, of_rows),
    "packed, sequence parallel": (lambda: packed(**sp), of_cut_rows),
    "copied heads": (heads, of_rows),
    "copied heads, sequence parallel": (lambda: heads(**sp), of_cut_rows),
    "row": (row, of_parts),
    "row, sequence parallel": (lambda: row(**sp), of_cut_parts),
    "row that splits": (lambda: row(split_input=True), whole_features),
    "mlp": (mlp, of_rows),
    "mlp, gated": (lambda: mlp(activation="swiglu"), of_rows),
    "mlp, sequence parallel": (lambda: mlp(**sp), of_cut_rows),
    "mesh mlp": (OnMesh, of_cut_rows),
    "attention": (whole_attention, of_batches),
    "attention, sequence parallel": (lambda: whole_attention(**sp), of_batches),
    "torch's attention": (lambda: Shown(attention()), of_cut_rows),
    "torch's attention, batch first": (lambda: Shown(attention(batch_first=True)), of_cut_rows),
    "embedding": (embedding, ids),
    "embedding, sequence parallel": (lambda: embedding(sequence_parallel=True), lambda: ids()[:1]),
    "embedding of features": (features, ids),
    "embedding of features, gathered": (lambda: features(gather_output=True), ids),
    "layer norm": (lambda: tpk.nn.LayerNorm(IN, tp_mesh(), dtype=F64), of_rows),
    "layer norm, sequence parallel": (lambda: tpk.nn.LayerNorm(IN, tp_mesh(), **sp, dtype=F64), of_rows),
    "rms norm": (lambda: tpk.nn.RMSNorm(IN, tp_mesh(), dtype=F64), of_rows),
    "rms norm, sequence parallel": (lambda: tpk.nn.RMSNorm(IN, tp_mesh(), **sp, dtype=F64), of_rows),
    "dropout": (lambda: tpk.nn.Dropout(0.5, tp_mesh(), sharded=True), of_rows),
    "cross entropy of a head": (Loss, of_cut_rows),
}


class Shown(nn.Module):
    """Attention to itself, with the weights of its heads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.inner(x, x, x, average_attn_weights=False))


def trained(name: str, case: int, in_place: bool) -> tuple[list[Tensor], list[str]]:
    """All gradients on this rank; and which outputs have memory in common with others, inputs or parameters."""
    torch.manual_seed(3)
    make, given = MODULES[name]
    module, x = make(), given()[case]
    if x.is_floating_point():
        x.requires_grad_()
    result = module(x)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    held = {key: p.to_local() if isinstance(p, DTensor) else p for key, p in module.named_parameters()}
    names = [*(f"output {i}" for i in range(len(outputs))), "x", *held]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*outputs, x, *held.values())]
    common = [
        f"{names[i]} and {names[j]}"
        for i in range(len(outputs))
        for j in range(len(places))
        if i != j and places[i] == places[j]
    ]
    total = torch.zeros((), dtype=F64)
    for number, y in enumerate(outputs):
        if y._is_view() and dist.get_world_size() > 1:
            common.append(f"output {number} is a view")
        if in_place:
            y.add_(1)
            y *= number + 2
        else:
            y = (y + 1) * (number + 2)
        total = total + y.square().sum()
    total.backward()
    grads = [parameter.grad for parameter in module.parameters()]
    found = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in (*grads, x.grad)]
    return [grad for grad in found if grad is not None], common


def problems() -> list[str]:
    wrong = []
    for name, (_, given) in MODULES.items():
        for case, x in enumerate(given()):
            what = f"{name} of {tuple(x.shape)}: "
            try:
                written, common = trained(name, case, in_place=True)
                expected, _ = trained(name, case, in_place=False)
            except RuntimeError as error:
                wrong.append(what + str(error).partition(".")[0])
                continue
            wrong += [what + pair for pair in common]
            assert expected and len(written) == len(expected), what
            for one, other in zip(written, expected, strict=True):
                if not torch.equal(one, other):
                    wrong.append(f"{what}a gradient {tuple(one.shape)} differs")
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 1])
@pytest.mark.slow("6 s: every module")
def test_outputs_of_modules_can_be_written_to(ranks: Pools, world: int) -> None:
    assert ranks(world).run(problems, timeout=LIMIT_S) == [[]] * world


def with_main_grads() -> list[str]:
    """The weight gradient goes to ``main_grad``: on one rank, too, by a function with a gradient of its own."""
    results = []
    for in_place in (True, False):
        torch.manual_seed(4)
        layer = tpk.nn.use_main_grads(mlp(activation=None), dtype=F64)
        y = layer(floats(2, ROWS, IN).requires_grad_())
        if in_place:
            y += 1
        else:
            y = y + 1
        y.square().sum().backward()
        results.append([parameter.main_grad.to_local() for parameter in layer.parameters()])
    for one, other in zip(*results, strict=True):
        close(one, other, "a main_grad")
    return []


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_can_be_written_to_where_gradients_go_to_main_grads(ranks: Pools, world: int) -> None:
    assert ranks(world).run(with_main_grads, timeout=LIMIT_S) == [[]] * world


def under_autocast() -> list[str]:
    wrong = []
    for name, make in {"column": tpk.nn.ColumnParallelLinear, "row": tpk.nn.RowParallelLinear}.items():
        for parallel in (False, True):
            grads = []
            for in_place in (True, False):
                torch.manual_seed(5)
                layer = make(IN, IN, tp_mesh(), sequence_parallel=parallel)
                features = IN if name == "column" else IN // dist.get_world_size()
                x = torch.randn(2, ROWS, features).requires_grad_()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = layer(x)
                    if in_place:
                        y += 1
                    else:
                        y = y + 1
                    y.float().square().sum().backward()
                grads.append(x.grad)
            if not torch.equal(*grads):  # type: ignore[arg-type]
                wrong.append(f"{name}, sequence_parallel={parallel}")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_can_be_written_to_under_autocast(ranks: Pools, world: int) -> None:
    assert ranks(world).run(under_autocast, timeout=LIMIT_S) == [[]] * world
