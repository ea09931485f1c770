"""Attention with heads cut over the ranks equals the whole one, and random numbers are drawn by region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.nn.reference import (
    LIMIT_S,
    close,
    close_parameters,
    close_replicas,
    mine,
    part_of,
    sequence_sizes,
    tp_mesh,
)
from tpkernels.nn import Dropout, ParallelAttention, apply_rotary, check_rng, sharded_rng
from tpkernels.testing.spawn import Pools

WIDTH, LENGTH, HEAD = 10, 7, 4


class Reference(nn.Module):
    """Attention on one process, written out, with the names and shapes of the parallel one's parameters."""

    def __init__(self, linears: dict[str, nn.Linear], heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        for name, linear in linears.items():
            count, dim = (heads if name in ("query", "out") else kv_heads), int(name == "out")
            parameters = {"weight": linear.weight.detach().unflatten(dim, (count, -1)).clone()}
            if linear.bias is not None:
                bias = linear.bias.detach()
                parameters["bias"] = bias.clone() if dim else bias.unflatten(0, (count, -1)).clone()
            self.add_module(name, nn.ParameterDict(parameters))

    def forward(self, x: Tensor, *, causal: bool, base: float | None, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.project(x, getattr(self, name)) for name in ("query", "key", "value"))
        if base is not None:
            q, k = self.turned(q, base), self.turned(k, base)
        k, v = (one.repeat_interleave(self.heads // self.kv_heads, 1) for one in (k, v))
        scores = q @ k.transpose(2, 3) / HEAD**0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out: Any = self.out
        context = (scores.softmax(-1) @ v).transpose(1, 2)
        y = torch.einsum("bshd,ohd->bso", context, out["weight"])
        return y + out["bias"] if "bias" in out else y

    @staticmethod
    def project(x: Tensor, part: Any) -> Tensor:
        y = torch.einsum("bsi,hdi->bhsd", x, part["weight"])
        return y + part["bias"].unsqueeze(1) if "bias" in part else y

    @staticmethod
    def turned(x: Tensor, base: float) -> Tensor:
        """Rotation by complex multiplication."""
        half = HEAD // 2
        angles = torch.arange(LENGTH).double().unsqueeze(1) * base ** -(torch.arange(half).double() / half)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], -1)


def linears(heads: int, kv_heads: int, bias: bool) -> dict[str, nn.Linear]:
    sizes = {"query": (WIDTH, heads), "key": (WIDTH, kv_heads), "value": (WIDTH, kv_heads)}
    made = {name: nn.Linear(width, count * HEAD, bias).double() for name, (width, count) in sizes.items()}
    return {**made, "out": nn.Linear(heads * HEAD, WIDTH, bias).double()}


def attention_equals_the_whole(
    heads: int, kv_heads: int, sequence_dim: int | None, *, causal: bool, base: float | None, bias: bool = True
) -> ParallelAttention:
    mesh = tp_mesh()
    plain = linears(heads, kv_heads, bias)
    reference = Reference(plain, heads, kv_heads)
    parallel = ParallelAttention.from_linears(
        **plain, group=mesh, num_heads=heads, num_kv_heads=kv_heads, causal=causal, rotary_base=base,
        sequence_parallel=sequence_dim is not None, sequence_dim=-2 if sequence_dim is None else sequence_dim,
        save_gathered=bias,
    )  # fmt: skip
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = None if causal else torch.rand(2, 1, LENGTH, LENGTH) < 0.7
    if mask is not None:
        mask |= torch.eye(LENGTH, dtype=torch.bool)
    expected = reference(x, causal=causal, base=base, mask=mask)
    g = torch.randn_like(expected)
    expected.backward(g)
    assert x.grad is not None

    def ours(tensor: Tensor) -> Tensor:
        """In the layout of the module under test."""
        tensor = tensor.detach()
        if sequence_dim is None:
            return tensor.clone()
        return mine(tensor.transpose(0, 1), 0) if sequence_dim == 0 else mine(tensor, 1)

    x_r = ours(x).requires_grad_()
    y = parallel(x_r, attention_mask=mask, shard_sizes=None if sequence_dim is None else sequence_sizes(LENGTH))
    y.backward(ours(g))
    assert x_r.grad is not None
    what = f"{heads} heads, {kv_heads} kv, sequence_dim={sequence_dim}, causal={causal}, base={base}"
    close(y, ours(expected), f"y, {what}")
    close(x_r.grad, ours(x.grad), f"dx, {what}")
    close_parameters(parallel, reference)
    close_replicas(parallel)
    return parallel


def all_heads() -> list[str]:
    found = []
    for heads, kv_heads in ((6, 6), (4, 2), (6, 2), (5, 1), (2, 2)):
        attention_equals_the_whole(heads, kv_heads, None, causal=True, base=None)
        attention_equals_the_whole(heads, kv_heads, -2, causal=False, base=100.0, bias=False)
        module = attention_equals_the_whole(heads, kv_heads, 0, causal=True, base=10000.0)
        cut = module.key.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
        assert cut or module.key.weight.placements == (Replicate(),)  # type: ignore[attr-defined]
        assert module.query.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
        assert module.out.weight.placements == (Shard(1),)  # type: ignore[attr-defined]
        found.append(f"{kv_heads} of {'/'.join(map(str, module.heads))} {'cut' if cut else 'whole'}")
        assert f"heads={'/'.join(map(str, module.heads))} of 4" in repr(module)
    new_attention_has_linears_weights()
    return found


def new_attention_has_linears_weights() -> None:
    mesh = tp_mesh()
    torch.manual_seed(4)
    plain = [nn.Linear(8, width) for width in (8, 4, 4)]
    plain.append(nn.Linear(8, 8))
    torch.manual_seed(4)
    parallel: Any = ParallelAttention(8, 4, mesh, num_kv_heads=2)
    for linear, name in zip(plain, ("query", "key", "value", "out"), strict=True):
        weight = getattr(parallel, name).weight
        close(weight.to_local(), part_of(linear.weight.detach().view(weight.shape), weight), name)


CUTS = {
    1: ["6 of 6 cut", "2 of 4 cut", "2 of 6 cut", "1 of 5 cut", "2 of 2 cut"],
    2: ["6 of 3/3 cut", "2 of 2/2 cut", "2 of 3/3 cut", "1 of 3/2 whole", "2 of 1/1 cut"],
    3: ["6 of 2/2/2 cut", "2 of 2/2/0 cut", "2 of 2/2/2 whole", "1 of 2/2/1 whole", "2 of 1/1/0 cut"],
}


@pytest.mark.sample(2)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [3, 1, 2])
def test_attention_equals_the_whole_for_any_heads_and_every_option(ranks: Pools, world: int) -> None:
    for found in ranks(world).run(all_heads, timeout=LIMIT_S):
        assert found == CUTS[world]


@pytest.mark.cpu
def test_rotary_pairs_and_positions_are_as_asked() -> None:
    x = torch.randn(2, 3, LENGTH, HEAD, dtype=torch.float64)
    at = torch.arange(LENGTH)
    close(apply_rotary(x, at, base=100.0), Reference.turned(x, 100.0), "halves")
    shuffled = x.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)  # pairs of neighbours from pairs of halves
    expected = Reference.turned(x, 100.0).unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)
    close(apply_rotary(shuffled, at, base=100.0, interleaved=True), expected, "interleaved")
    close(
        apply_rotary(x[:, :, 3:5], torch.tensor([3, 4]), base=100.0), Reference.turned(x, 100.0)[:, :, 3:5], "at 3, 4"
    )
    half = x.bfloat16()
    assert torch.equal(apply_rotary(half, at), apply_rotary(half.float(), at).bfloat16()), "rounded once"
    with pytest.raises(ValueError, match="even number of features per head, got 3"):
        apply_rotary(x[..., :3], at)


BAD = {
    r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)": {"num_kv_heads": 3},
    r"d_model \(10\) must be a multiple of num_heads \(4\)": {"d_model": 10},
    r"head_dim must be .*even for rotary embedding, got 3": {"head_dim": 3, "rotary_base": 10.0},
    r"dropout must be at least 0 and below 1, got 1.0": {"dropout": 1.0},
    r"sequence_dim must be 0 .*got 2": {"sequence_dim": 2},
}


def bad_attention() -> None:
    mesh = tp_mesh()
    for words, options in BAD.items():
        arguments: Any = {"d_model": 8, "num_heads": 4, **options}
        with pytest.raises(ValueError, match=words):
            ParallelAttention(group=mesh, **arguments)
    module = ParallelAttention(8, 4, mesh, causal=True)
    calls: dict[str, Callable[[], Tensor]] = {
        r"x must be \[B, S, 8\].*got shape \(2, 3, 7\)": lambda: module(torch.ones(2, 3, 7)),
        "attention_mask is for causal=False": lambda: module(torch.ones(2, 3, 8), attention_mask=torch.ones(3, 3)),
        "shard_sizes .* needs sequence_parallel=True": lambda: module(torch.ones(2, 3, 8), shard_sizes=[1, 2]),
    }
    for words, attempt in calls.items():
        with pytest.raises(ValueError, match=words):
            attempt()
    plain = linears(4, 2, True)
    for words, wrong in (
        (r"value has 16 features, but num_kv_heads \(2\) of 4 are 8", {"value": nn.Linear(WIDTH, 16)}),
        (r"out takes 8 features, but query has 16", {"out": nn.Linear(8, WIDTH)}),
        (r"must take the same number of features, got \[9, 10\]", {"key": nn.Linear(9, 8)}),
    ):
        with pytest.raises(ValueError, match=words):
            ParallelAttention.from_linears(**{**plain, **wrong}, group=mesh, num_heads=4, num_kv_heads=2)
    assert module(torch.ones(2, 3, 8)).shape == (2, 3, 8)  # the group goes on


@pytest.mark.gloo
def test_attention_of_parts_that_do_not_fit_is_refused_on_every_rank(ranks: Pools) -> None:
    ranks(2).run(bad_attention, timeout=LIMIT_S)


# --- random numbers ---------------------------------------------------------------------------------------------------


def everyone(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def regions() -> None:
    mesh = tp_mesh()
    torch.manual_seed(7)
    check_rng(mesh)
    x = torch.ones(64)
    replicated, sharded = Dropout(0.5, mesh, sharded=False), Dropout(0.5, mesh, sharded=True)
    a, b, c, d = replicated(x), sharded(x), sharded(x), replicated(x)
    assert torch.equal(*everyone(a)), "a replica's mask is one mask"
    assert not torch.equal(*everyone(b)), "shards have masks of their own"
    assert not torch.equal(b, c), "and another one each time"
    assert torch.equal(*everyone(d)), "a region does not disturb what follows"
    assert not torch.equal(a, d)
    check_rng(mesh)
    torch.manual_seed(7)
    assert torch.equal(replicated(x), a) and torch.equal(sharded(x), b), "the seed says it all"
    assert torch.equal(sharded.eval()(x), x)
    with sharded_rng(mesh):
        torch.rand(1 + dist.get_rank())  # however many each draws
    check_rng(mesh)
    torch.rand(1 + dist.get_rank())
    with pytest.raises(ValueError, match="default generators of the group's ranks differ"):
        check_rng(mesh)


def checkpointed_attention_equals_the_plain_one() -> None:
    """Computed again in the backward pass, every mask is what it was, or the gradients would differ."""
    mesh = tp_mesh()
    torch.manual_seed(2)
    module = nn.ModuleList(ParallelAttention(8, 4, mesh, dropout=0.5) for _ in range(2))
    inner = Dropout(0.5, mesh, sharded=False)

    def block(x: Tensor) -> Tensor:
        for attention in module:
            x = x + inner(attention(x))
        return x

    x = torch.randn(2, 5, 8)
    gradients, outputs = [], []
    for again in (False, True):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        y: Tensor = checkpoint(block, leaf, use_reentrant=False) if again else block(leaf)  # type: ignore[assignment]
        torch.rand(5)  # the state has moved on when the block runs again
        y.square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        outputs.append(y)
    assert torch.equal(*outputs) and torch.equal(*gradients)
    assert torch.equal(*everyone(outputs[0])), "y is a replica"
    other = block(x)
    assert not torch.equal(other, outputs[0])


def random_numbers() -> None:
    regions()
    checkpointed_attention_equals_the_plain_one()
    compiled_attention_equals_the_eager_one()


def compiled_attention_equals_the_eager_one() -> None:
    """Without dropout, whose regions are not for compiled code; one key-value head, which both ranks keep."""
    torch.manual_seed(0)
    module = ParallelAttention(20, 5, tp_mesh(), num_kv_heads=1, causal=True, rotary_base=10.0, sequence_parallel=True)
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 20)
    assert torch.equal(compiled(x), module(x))


@pytest.mark.gloo
def test_random_numbers_are_equal_where_activations_are_and_survive_checkpointing(ranks: Pools) -> None:
    ranks(2).run(random_numbers, timeout=LIMIT_S)


def alone() -> None:
    mesh = tp_mesh()
    torch.manual_seed(1)
    expected = F.dropout(torch.ones(20), 0.5)
    torch.manual_seed(1)
    assert torch.equal(Dropout(0.5, mesh, sharded=True)(torch.ones(20)), expected)


@pytest.mark.gloo
def test_one_rank_draws_what_the_plain_model_draws(ranks: Pools) -> None:
    ranks(1).run(alone, timeout=LIMIT_S)
