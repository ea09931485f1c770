"""The block on a two-dimensional mesh equals the unsharded one, gradients included, and moves the bytes it says."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.nn.reference import LIMIT_S, close, whole, without_shared_memory
from tpkernels.backends.point_to_point import exchange
from tpkernels.comm import transport
from tpkernels.comm.groups import resolve
from tpkernels.errors import GroupMismatch
from tpkernels.nn import MeshMLP2D, ParallelMLP, mesh2d, mesh_mlp_bytes, use_main_grads
from tpkernels.nn.mesh2d import MovedBytes
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.testing.spawn import Pools


class Plain(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool, dtype: torch.dtype, gated: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias, dtype=dtype) if gated else None
        self.up = nn.Linear(width, hidden, bias, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        y: Tensor = self.down(hidden)
        return y

    def whole(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The value and the gradient of what a block has under this name."""
        parameters = dict(self.named_parameters())
        first, _, kind = name.partition(".")
        if first != "gate_up":
            return parameters[name], parameters[name].grad
        parts = [parameters[f"{one}.{kind}"] for one in ("gate", "up")]
        return torch.stack(parts), torch.stack([cast(Tensor, part.grad) for part in parts])


def mesh_of(y: int, x: int) -> DeviceMesh:
    return init_device_mesh("cpu", (y, x), mesh_dim_names=("y", "x"))


def block_equals_torch(
    mesh: DeviceMesh,
    width: int,
    hidden: int,
    slices: int | None,
    implementation: str,
    bias: bool,
    dtype: torch.dtype,
    gated: bool = False,
) -> None:
    (y, x), (row, column) = mesh.shape, mesh.get_coordinate() or (0, 0)
    torch.manual_seed(width)
    plain = Plain(width, hidden, bias, dtype, gated)
    options: dict[str, Any] = {"num_slices": slices, "implementation": implementation}
    options["activation"] = "swiglu" if gated else "gelu"
    block = MeshMLP2D.from_linears(plain.up, plain.down, mesh, gate=plain.gate, **options)
    torch.manual_seed(width)
    fresh = MeshMLP2D(width, hidden, mesh, bias=bias, dtype=dtype, **options)
    for one, other in zip(block.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(cast(DTensor, one).to_local(), cast(DTensor, other).to_local()), "under one seed"
    counts = [3 + 2 * i for i in range(y)]  # other rows on each y, and another number of them
    counts[-1] = 0 if y > 2 else counts[-1]
    batch = torch.randn(sum(counts), 2, width, dtype=dtype, requires_grad=True)
    g = torch.randn_like(batch)
    expected = plain(batch)
    expected.backward(g)
    assert batch.grad is not None
    features = chunk_sizes(width, x)
    assert block.features == features
    rows = slice(offsets(counts)[row], offsets(counts)[row] + counts[row])
    columns = slice(offsets(features)[column], offsets(features)[column] + features[column])

    def mine(tensor: Tensor) -> Tensor:
        return tensor.detach()[rows, :, columns].clone()

    x_r = mine(batch).requires_grad_()
    out = block(x_r)
    out.backward(mine(g))
    what = f"mesh {y} x {x}, {width} -> {hidden}, slices={slices}, {implementation}, gated={gated}"
    assert x_r.grad is not None
    close(out, mine(expected), f"y, {what}")
    close(x_r.grad, mine(batch.grad), f"dx, {what}")
    for name, parameter in block.named_parameters():
        value, grad = plain.whole(name)
        assert grad is not None and isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]
        close(whole(parameter), value, f"{name}, {what}")
        close(whole(parameter.grad), grad, f"gradient of {name}, {what}")


def blocks_equal_torch(y: int, x: int) -> str:
    mesh = mesh_of(y, x)
    block_equals_torch(mesh, 10, 13, None, "auto", True, torch.float64)
    block_equals_torch(mesh, 9, 3, 3, "chunked", False, torch.float64)  # some ranks have no column of the hidden layer
    block_equals_torch(mesh, 16, 24, 2, "unfused", True, torch.float32)
    block_equals_torch(mesh, 10, 13, 3, "auto", True, torch.float64, gated=True)
    block_equals_torch(mesh, 9, 3, None, "chunked", False, torch.float64, gated=True)
    if y * x < 8:
        main_grad_takes_the_weights(mesh)
    return repr(MeshMLP2D(6, 8, mesh, implementation="chunked"))


def main_grad_takes_the_weights(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    for activation in ("gelu", "swiglu"):
        main_grad_takes_the_weights_of(mesh, activation)


def main_grad_takes_the_weights_of(mesh: DeviceMesh, activation: str) -> None:
    block, other = (MeshMLP2D(8, 12, mesh, activation=activation) for _ in range(2))
    other.load_state_dict(block.state_dict())
    use_main_grads(other)
    x = torch.randn(3, block.features[mesh.get_local_rank(1)])
    for module in (block, other):
        for _ in range(2):
            module(x).square().sum().backward()
    for (name, a), b in zip(block.named_parameters(), other.parameters(), strict=True):
        assert b.grad is None and isinstance(a.grad, DTensor)
        close(b.main_grad.to_local(), a.grad.to_local(), name)  # type: ignore[attr-defined]


def compiled_equals_eager() -> None:
    mesh = mesh_of(2, 1)
    block = MeshMLP2D(8, 12, mesh)
    compiled: Any = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 8)
    gradients = []
    for module in (block, compiled):
        module(x).square().sum().backward()
        assert isinstance(block.up.weight.grad, DTensor)
        gradients.append(block.up.weight.grad.to_local())
        block.zero_grad()
    assert torch.equal(*gradients)


def parameters_live_on_the_mesh_that_they_were_given() -> None:
    """Not on an equal one of an earlier module, whose groups may be gone by now."""
    for mesh in (mesh_of(2, 1), mesh_of(2, 1)):
        assert MeshMLP2D(8, 12, mesh).mesh is mesh
        axis = mesh["x"]
        assert ParallelMLP(8, 12, axis).down.mesh is axis


@pytest.mark.gloo
def test_parameters_live_on_the_mesh_that_they_were_given(ranks: Pools) -> None:
    ranks(2).run(parameters_live_on_the_mesh_that_they_were_given, timeout=LIMIT_S)


@pytest.mark.full("seconds of compiling")
@pytest.mark.gloo
def test_the_compiled_block_equals_the_eager_one(ranks: Pools) -> None:
    ranks(2).run(compiled_equals_eager, timeout=LIMIT_S)


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 2), (8, 1)])
def test_the_block_equals_the_unsharded_one_gradients_included(ranks: Pools, shape: tuple[int, int]) -> None:
    text = ranks(shape[0] * shape[1]).run(blocks_equal_torch, *shape, timeout=LIMIT_S)[0]
    assert text.startswith(
        f"MeshMLP2D(\n  d_model=6, d_ff=8, mesh={shape}, activation='gelu', implementation='chunked'"
    )


def counted(tokens: int, width: int, hidden: int, y: int, x: int, kind: str, backward: bool, gated: bool) -> int:
    """Bytes that arrive at this rank in one call, as messages: the groups must not share memory."""
    mesh = mesh_of(y, x)
    options: dict[str, Any] = {"bias": False, "activation": "swiglu" if gated else "gelu", "implementation": "chunked"}
    if kind == "2d":
        block: nn.Module = MeshMLP2D(width, hidden, mesh, num_slices=2, **options)
        shape = (tokens // y, width // x)
    else:
        world = DeviceMesh("cpu", list(range(y * x)))
        block = ParallelMLP(width, hidden, world, sequence_parallel=True, **options)
        shape = (tokens // (y * x), width)
    meshes = {cast(DTensor, parameter).device_mesh for parameter in block.parameters()}  # may be an equal, older mesh
    for group in (group for mesh in meshes for group in mesh.get_all_groups()):
        state = resolve(group)
        without_shared_memory(state, "a test counts messages")
        state.agreed.clear()
        state.checked.clear()
    data = torch.randn(shape, requires_grad=True)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = block(data)
        if backward:
            out.sum().backward()

    arrived: Counter[str] = Counter()
    real = transport.exchange

    def counting(group: Any, tag: int, chunk: int, sends: Any, recvs: Any, *rest: Any) -> Any:
        arrived["bytes"] += sum(tensor.numel() * tensor.element_size() for _, tensor in recvs)
        return real(group, tag, chunk, sends, recvs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        step()  # the first call agrees
        for module in (transport, exchange):
            patch.setattr(module, "exchange", counting)
        step()
    return arrived["bytes"]


def counted_bytes() -> list[tuple[str, int, MovedBytes]]:
    tokens, width, hidden, y, x = 32, 16, 24, 2, 2
    found = []
    for backward, gated in ((False, False), (True, False), (False, True), (True, True)):
        computed = mesh_mlp_bytes(tokens, width, hidden, y, x, gated=gated, itemsize=4, backward=backward)
        for kind in ("2d", "1d"):
            arrived = counted(tokens, width, hidden, y, x, kind, backward, gated)
            found.append((f"{kind}, backward={backward}, gated={gated}", arrived, computed[kind]))
    return found


@pytest.mark.gloo
@pytest.mark.slow("4 s")
def test_the_computed_bytes_are_those_that_arrive(ranks: Pools) -> None:
    for found in ranks(4).run(counted_bytes, timeout=LIMIT_S):
        for what, arrived, computed in found:
            assert arrived == computed.total, f"{what}: {arrived} arrived, computed {computed}"


@pytest.mark.cpu
def test_a_block_with_more_tokens_than_weights_moves_less_on_the_mesh() -> None:
    """8 ranks, Llama-7B's sizes, bf16."""
    moved = mesh_mlp_bytes(65536, 4096, 11008, 4, 2)
    assert moved["2d"].total < moved["1d"].total
    few = mesh_mlp_bytes(1024, 4096, 11008, 4, 2)
    assert few["1d"].total < few["2d"].total
    assert mesh_mlp_bytes(64, 8, 8, 1, 4)["2d"] == mesh_mlp_bytes(64, 8, 8, 1, 4)["1d"], "one row of ranks is 1d"


@pytest.mark.cpu
def test_the_table_of_the_module_is_what_the_function_computes() -> None:
    text = mesh2d.__doc__ or ""
    lines = re.findall(r"^ +(\d[\d, ]+)$", text, re.M)
    rows = [[int(cell.replace(",", "")) for cell in line.split()] for line in lines]
    columns = [("2d", 8, 1), ("2d", 4, 2), ("2d", 2, 4), ("1d", 1, 8), ("1d x dp", 4, 2), ("1d x dp", 2, 4)]
    assert len(rows) == 4
    for tokens, *cells in rows:
        computed = [mesh_mlp_bytes(tokens, 4096, 11008, y, x)[kind].total / 2**20 for kind, y, x in columns]
        assert cells == [round(value) for value in computed]


def bad_meshes() -> None:
    mesh = mesh_of(2, 2)
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    attempts: dict[str, Any] = {
        r"mesh must be a DeviceMesh of two axes \(Y, X\), got 1 axes": lambda: MeshMLP2D(4, 8, mesh["x"]),
        r"mesh must be a DeviceMesh of two axes \(Y, X\), got ProcessGroup": lambda: MeshMLP2D(4, 8, mesh.get_group(0)),  # type: ignore[arg-type]
        r"d_ff must be at least 1, got 0": lambda: MeshMLP2D(4, 0, mesh),
        r"activation must be None or one of .*'swiglu'.*got 'mish'": lambda: MeshMLP2D(4, 8, mesh, activation="mish"),
        r"activation 'swiglu' needs a gate": lambda: MeshMLP2D.from_linears(up, down, mesh, activation="swiglu"),
        r"activation 'gelu' has no gate": lambda: MeshMLP2D.from_linears(up, down, mesh, gate=up),
        r"gate \(4 -> 8, bias=False\) must be as up is \(4 -> 8, bias=True\)": lambda: MeshMLP2D.from_linears(
            up, down, mesh, gate=nn.Linear(4, 8, bias=False), activation="geglu"
        ),
        r"num_slices must be at least 1, got 0": lambda: MeshMLP2D(4, 8, mesh, num_slices=0),
        r"implementation.*fast": lambda: MeshMLP2D(4, 8, mesh, implementation="fast"),
        r"up \(4 -> 8\) and down \(4 -> 8\) do not fit": lambda: MeshMLP2D.from_linears(up, up, mesh),
        r"x must have 2 features on this rank, got shape \(3, 4\)": lambda: MeshMLP2D(4, 8, mesh)(torch.ones(3, 4)),
        r"bias must have the dtype of x|weight must have the dtype of x": lambda: MeshMLP2D(4, 8, mesh)(
            torch.ones(3, 2).double()
        ),
    }
    for words, attempt in attempts.items():
        with pytest.raises(ValueError, match=words):
            attempt()
    y = MeshMLP2D.from_linears(up, down, mesh)(torch.ones(3, 2))  # the groups go on
    assert y.shape == (3, 2)
    close_replicas_of_bias(MeshMLP2D(4, 8, mesh))


def close_replicas_of_bias(block: MeshMLP2D) -> None:
    """Biases are equal on all y, bit for bit, after a backward pass of other rows on each."""
    block(torch.randn(dist.get_rank() // 2 + 1, 2)).sum().backward()
    for part in (block.up, block.down):
        assert part.bias is not None and isinstance(part.bias.grad, DTensor)
        mine = part.bias.grad.to_local()
        everyone = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everyone, mine, group=block.mesh.get_group(0))
        assert torch.equal(*everyone)


@pytest.mark.gloo
def test_what_does_not_fit_the_mesh_is_refused_on_every_rank(ranks: Pools) -> None:
    ranks(4).run(bad_meshes, timeout=LIMIT_S)


def one_rank_with_other_features() -> None:
    mesh = mesh_of(2, 2)
    block = MeshMLP2D(4, 8, mesh)
    block(torch.ones(3, 3 if dist.get_rank() == 1 else 2))


@pytest.mark.gloo
def test_features_that_one_rank_finds_wrong_end_in_an_error_on_all(ranks: Pools) -> None:
    errors = ranks(4).run(one_rank_with_other_features, return_exceptions=True, timeout=60)
    assert isinstance(errors[1], ValueError)
    for rank in (0, 2, 3):  # two of them share an axis with rank 1; rank 2 hears of it from those
        with pytest.raises(GroupMismatch, match=r"rank . refused its arguments: gather_both_matmul: x must have 2"):
            raise errors[rank]
