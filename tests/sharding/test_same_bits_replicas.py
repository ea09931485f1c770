"""`data_parallel` with `same_bits`: the bits are those of any tensor-parallel degree, and of as many micro-batches."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tpkernels as tpk
from tests.kept_mesh import once_per_pool
from tpkernels.nn.gathering import gathered, gathered_over
from tpkernels.sharding import tree_reduce_scatter
from tpkernels.state import clipping
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

SAME_BITS, STEPS = 8, 4
Found = dict[str, Tensor]


class Small(nn.Module):
    """One of each kind of layer that is cut, whose sizes do not divide into blocks, and a norm that is not cut."""

    plan = {"embed": "vocabulary", "up": "column", "down": "row", "head": "column_gather"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(97, 64), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 250), nn.Linear(250, 64), nn.Linear(64, 97, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids[:, 1:].flatten())


@once_per_pool
def mesh_of(dp: int) -> DeviceMesh:
    """Of groups of its own: torch gives the axis of all ranks the default group, which is "dp" here and "tp" there."""
    grid = torch.arange(dist.get_world_size()).view(dp, -1)
    along_dp, _ = dist.new_subgroups_by_enumeration(grid.t().tolist())
    along_tp, _ = dist.new_subgroups_by_enumeration(grid.tolist())
    return DeviceMesh.from_group([along_dp, along_tp], "cpu", mesh=grid, mesh_dim_names=("dp", "tp"))


def train(dp: int, batches: int, shard: bool, dtype: torch.dtype, same_bits: int | None = SAME_BITS) -> Found:
    """Gradients, norms and parameters of AdamW on ``batches`` of each step, which ``dp`` replicas share in order."""
    mesh = mesh_of(dp)
    torch.manual_seed(7)
    model = tpk.parallelize(Small().to(dtype), mesh["tp"], Small.plan, same_bits=same_bits)
    model = tpk.data_parallel(model, mesh, shard=shard, units=[model.up, model.down])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    found: Found = {}
    each = batches // dp
    for step in range(STEPS):
        ids = torch.randint(97, (batches, 8, 25), generator=torch.Generator().manual_seed(step))
        own = ids[mesh["dp"].get_local_rank() * each :][:each]
        for number, batch in enumerate(own):
            cast(Any, model).set_requires_gradient_sync(number == each - 1)
            (model(batch) / each).backward()
        for name, parameter in model.named_parameters():
            found[f"gradient {step} of {name}"] = gathered(cast(Tensor, parameter.grad)).clone()
        found[f"norm {step}"] = tpk.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found | tpk.full_state_dict(model)


def differing(of_ranks: list[Found], expected: Found) -> list[str]:
    assert len(expected) == STEPS * (8 + 1) + 8, sorted(expected)
    return [
        f"{name}, rank {rank}"
        for rank, found in enumerate(of_ranks)
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_replicas_have_the_bits_of_two_micro_batches(ranks: Pools, dtype: torch.dtype) -> None:
    expected, _ = ranks(2).run(train, 1, 2, False, dtype)
    for shard in (False, True):
        assert not differing(ranks(2).run(train, 2, 2, shard, dtype), expected)


@pytest.mark.slow("three more layouts of four ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_of_two_and_four_ranks_have_the_bits_of_one(ranks: Pools, dtype: torch.dtype) -> None:
    (expected,) = ranks(1).run(train, 1, 2, True, dtype)
    for dp, shard in ((1, True), (2, True), (2, False)):
        assert not differing(ranks(4).run(train, dp, 2, shard, dtype), expected)
    expected, _ = ranks(2).run(train, 2, 4, True, dtype)
    for dp in (2, 4):
        assert not differing(ranks(4).run(train, dp, 4, True, dtype), expected)


def in_order(parts: list[Tensor]) -> list[Tensor]:
    return [sum(parts[1:-1], parts[0]), parts[-1]]


def train_wrongly(fault: str, dp: int) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "replicas are added in order":
            patch.setattr(tree_reduce_scatter, "_halves", in_order)
        else:
            patch.setattr(clipping, "gathered_over", lambda grad, axis: gathered_over(grad, axis).flip(0))
        return train(dp, 4, True, torch.float32)


@pytest.mark.slow("that these tests can fail")
@pytest.mark.parametrize("fault", ["replicas are added in order", "the norm takes rows in another order"])
def test_a_seeded_fault_is_caught(ranks: Pools, fault: str) -> None:
    expected, _ = ranks(2).run(train, 2, 4, True, torch.float32)
    assert differing(ranks(4).run(train_wrongly, fault, 4), expected)


def refusals() -> None:
    model = tpk.parallelize(Small(), mesh_of(4)["tp"], Small.plan, same_bits=SAME_BITS)
    with pytest.raises(ValueError, match=r"more than two replicas \(dp=4\).*shard=True"):
        tpk.data_parallel(model, mesh_of(4))


@pytest.mark.slow("four ranks")
def test_what_torch_would_add_in_its_own_order_is_refused(ranks: Pools) -> None:
    ranks(4).run(refusals)
