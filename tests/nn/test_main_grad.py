"""Weight gradients go to ``main_grad`` in fp32, by the GEMM itself, as Megatron's optimizers expect."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.nn.reference import LIMIT_S, close, part_of, sequence_sizes, tp_mesh
from tpkernels.measure.memory import peak_bytes
from tpkernels.nn import (
    ColumnParallelLinear,
    ColumnParallelLinears,
    LayerNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    use_main_grads,
    vocab_parallel_linear_cross_entropy,
)
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HIDDEN, VOCABULARY, LENGTH = 6, 13, 11, 7


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.pair = nn.ModuleDict({"gate": nn.Linear(WIDTH, HIDDEN), "up": nn.Linear(WIDTH, HIDDEN, bias=False)})
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        y = self.head(x + self.down(F.silu(self.pair["gate"](x)) * self.pair["up"](x)))
        return F.cross_entropy(y.flatten(0, 1), target.flatten())


class Parallel(nn.Module):
    """The same with every op that has a weight: two of each, because each runs in two modes."""

    def __init__(self, plain: Plain, sequence_parallel: bool) -> None:
        super().__init__()
        mesh = tp_mesh()
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        self.sizes = sequence_sizes(LENGTH) if sequence_parallel else None
        self.table = VocabParallelEmbedding.from_embedding(plain.table, mesh, **options)
        self.norm = LayerNorm.from_norm(plain.norm, mesh, **options)
        pair = cast(dict[str, nn.Linear], dict(plain.pair.items()))
        self.pair = ColumnParallelLinears.from_linears(pair, mesh, **options)
        self.down = RowParallelLinear.from_linear(plain.down, mesh, **options)
        self.head = self.table.tie(ColumnParallelLinear.from_linear(plain.head, mesh, **options))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.table(ids, shard_sizes=self.sizes))
        gate, up = self.pair(x, shard_sizes=self.sizes)
        x = x + self.down(F.silu(gate) * up, shard_sizes=self.sizes)
        return vocab_parallel_linear_cross_entropy(x, self.head, target, shard_sizes=self.sizes, chunk_tokens=4)


def all_gradients_reach_main_grad(sequence_parallel: bool, marked: bool) -> None:
    plain = Plain()
    parallel = Parallel(plain, sequence_parallel)
    assert use_main_grads(parallel, dtype=torch.float64) is parallel
    fused = [name for name, _ in parallel.named_parameters() if name.endswith("weight") and "norm" not in name]
    assert len(fused) == 4
    if marked:
        for parameter in parallel.parameters():
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for _ in range(2):  # micro-batches
        ids, target = torch.randint(VOCABULARY, (2, 3, LENGTH)).unbind()
        plain(ids, target).backward()
        parallel(ids, target).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        main_grad = parameter.main_grad  # type: ignore[attr-defined]
        assert isinstance(main_grad, DTensor) and isinstance(parameter, DTensor)
        assert main_grad.placements == parameter.placements
        gradient = expected[name].grad
        assert gradient is not None
        if marked and name in fused:
            assert parameter.grad_added_to_main_grad  # type: ignore[attr-defined]
            # of the table a second use, without a GEMM, comes through grad, to which zeros were added
            assert getattr(parameter, "zero_out_wgrad", False) == (name == "table.weight")
        assert parameter.grad is None, name
        close(main_grad.to_local(), part_of(gradient, parameter), f"main_grad of {name}")


def megatron_convention() -> None:
    """Without hooks of ours: the mark is set, and autograd gets a tensor to drop, of the right kind."""
    mesh = tp_mesh()
    for zeros in (False, True):
        for layer, width in ((ColumnParallelLinear(6, 8, mesh), 6), (RowParallelLinear(8, 6, mesh), 8 // mesh.size())):
            weight: Any = layer.weight
            weight.main_grad = torch.zeros(weight.to_local().shape)  # a plain tensor of the local shape will do
            weight.grad_added_to_main_grad = False
            weight.zero_out_wgrad = zeros
            x = torch.randn(5, width)
            seen: list[Tensor] = []
            handle = weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
            layer(x).sum().backward()
            handle.remove()
            assert weight.grad_added_to_main_grad
            (given,) = seen
            assert given.shape == weight.shape and given.dtype == weight.dtype
            assert not zeros or not local_of(given).any()
            close(weight.main_grad, torch.ones(5, weight.main_grad.shape[0]).t() @ x, "main_grad")
            weight.main_grad = torch.zeros(3)
            with pytest.raises(
                ValueError, match=r"main_grad must have the shape of the weight on this rank .*got \(3,\)"
            ):
                layer(x)
            weight.main_grad = None  # and without one all is as before
            layer.zero_grad()
            layer(x).sum().backward()
            close(local_of(weight.grad), torch.ones(5, local_of(weight).shape[0]).t() @ x, "grad")


def bf16_gradients_are_not_rounded() -> None:
    """Integers that fp32 holds and bf16 does not: 257 x 257 ones, and four micro-batches of them."""
    mesh, rows = tp_mesh(), 257
    layer = ColumnParallelLinear(4, 8, mesh, dtype=torch.bfloat16)
    weight: Any = layer.weight
    x = torch.ones(rows, 4, dtype=torch.bfloat16)
    layer(x).sum().backward()
    local = local_of(weight)
    assert not bool((local_of(weight.grad).float() == rows).any()), "bf16 must not hold this number"
    weight.grad = None
    use_main_grads(layer)
    for _ in range(4):
        layer(x).sum().backward()
    assert_bitwise_equal(local_of(weight.main_grad), torch.full(local.shape, 4.0 * rows), "main_grad")


def no_gradient_of_the_weight_exists() -> tuple[int, int]:
    """Peak bytes of the backward pass without and with main_grad, and a weight that dwarfs all activations."""
    mesh = tp_mesh()
    layer = ColumnParallelLinear(512, 512 * mesh.size(), mesh, bias=False)
    x = torch.randn(8, 512)

    def work() -> None:
        layer(x).sum().backward()
        layer.weight.grad = None

    work()
    without = peak_bytes(work)
    use_main_grads(layer)
    work()
    return without, peak_bytes(work)


def main_grads(mode: str) -> Any:
    if mode == "memory":
        return no_gradient_of_the_weight_exists()
    megatron_convention()
    bf16_gradients_are_not_rounded()
    for sequence_parallel in (False, True):
        for marked in (False, True):
            all_gradients_reach_main_grad(sequence_parallel, marked)
    return None


@pytest.mark.parametrize("world", [1, 2])
def test_weight_gradients_are_added_to_main_grad_in_fp32(ranks: Pools, world: int) -> None:
    ranks(world).run(main_grads, "values", timeout=LIMIT_S)


def test_no_gradient_of_the_weight_exists_beside_main_grad(ranks: Pools) -> None:
    for without, with_main_grad in ranks(2).run(main_grads, "memory", timeout=LIMIT_S):
        weight = 512 * 512 * 4
        assert without >= weight > 4 * with_main_grad, (without, with_main_grad)


@pytest.mark.gpu
def test_a_bf16_gemm_adds_to_an_fp32_main_grad_on_a_gpu() -> None:
    from tpkernels.ops.main_grad import accumulate

    dz = torch.ones(257, 16, dtype=torch.bfloat16, device="cuda")
    main_grad = torch.ones(16, 8, device="cuda")
    accumulate(main_grad, dz, dz[:, :8].contiguous())
    assert bool((main_grad == 258).all())
