"""Heads that do not divide over the ranks: what plans say, when they are proven, and that a wrong cut is caught.

That such models compute and train as unsharded ones do is tested with the others, under the names of ``zoo.UNEVEN``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.packed_heads import Grouped
from tests.planning.per_head import WIDTH, Attention
from tpkernels.nn import ColumnParallelLinear, RowParallelLinear
from tpkernels.nn.parallel_linear import ParallelLinear
from tpkernels.planning.replays import replay
from tpkernels.sharding import Column, CopiedHeads, Features, Row
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")


def test_a_plan_cuts_heads_as_torch_chunk_does_and_shows_each_rank() -> None:
    model = zoo.Attention(40, 10)
    plan = tpk.make_plan(model, 4, example_inputs=torch.zeros(2, 7, 40))
    assert plan["qkv"].style == Column(segments=(40, 40, 40), units=(4, 4, 4)) and plan["proj"].style == Row(unit=4)
    assert plan.attributes == {"num_heads": (10, (3, 3, 3, 1))}
    assert "10 heads, 3/3/3/1 per rank" in plan["qkv"].reason
    assert "120x40 -> 36x40 .. 12x40" in str(plan) and "attribute num_heads: 10 -> 3/3/3/1" in str(plan)
    features = torch.tensor([12, 12, 12, 4])
    held = 4 * (features * (3 * 40 + 3) + features * 40 + 40)  # rows and biases, columns, the bias that all have
    assert plan.bytes_per_rank == tuple(held.tolist())
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(model)


@pytest.mark.slow("6 s")
def test_key_value_heads_are_cut_with_their_queries_or_copied() -> None:
    """5 key-value heads are 2, 2 and 1 on 3 ranks, and 2, 1, 1 and 1 on 4; of 2 each of ten queries has a copy."""
    attention = "model.layers.0.self_attn."
    plan = tpk.make_plan(zoo.build("llama 10"), 3)
    assert plan[attention + "q_proj"].style == Column(unit=8) and plan[attention + "v_proj"].style == Column(unit=4)
    assert "10 heads, 4/4/2 per rank" in plan[attention + "v_proj"].reason
    plan = tpk.make_plan(zoo.build("llama 10"), 4)
    assert plan[attention + "q_proj"].style == Column(unit=8) and plan[attention + "v_proj"].style == Column(unit=4)
    assert "10 heads, 4/2/2/2 per rank" in plan[attention + "v_proj"].reason
    plan = tpk.make_plan(zoo.build("qwen2 10"), 4)
    assert plan[attention + "q_proj"].style == Column(unit=4) and plan[attention + "o_proj"].style == Row(unit=4)
    assert plan[attention + "k_proj"].style == CopiedHeads(heads=2, copies=10)
    plan = tpk.make_plan(zoo.build("mistral 10"), 3)
    assert plan[attention + "k_proj"].style == CopiedHeads(heads=1, copies=5)


@pytest.mark.slow("4 s")
def test_a_bias_per_head_is_cut_with_the_heads() -> None:
    plan = tpk.make_plan(zoo.build("t5 10"), 4)
    table = plan["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"]
    assert table.style == Features() and [shape[1] for shape in table.parameters[0].local_shapes] == [3, 3, 3, 1]


@pytest.mark.parametrize(("heads", "world", "cut"), [
    (4, 3, (2, 1, 1)), (10, 8, (2, 2, 1, 1, 1, 1, 1, 1)), (28, 8, (4, 4, 4, 4, 3, 3, 3, 3)),
])  # fmt: skip
def test_heads_of_which_torch_chunk_would_leave_a_rank_none_are_dealt_out_as_evenly_as_can_be(
    heads: int, world: int, cut: tuple[int, ...]
) -> None:
    plan = tpk.make_plan(zoo.Attention(4 * heads, heads), world, example_inputs=torch.zeros(2, 7, 4 * heads))
    assert plan["qkv"].style == Column(segments=(4 * heads,) * 3, units=(4, 4, 4)) and plan["proj"].style == Row(unit=4)
    assert plan.attributes == {"num_heads": (heads, cut)}
    assert [shape[0] for shape in plan["qkv"].parameters[0].local_shapes] == [12 * cut[0]] * world  # with free places


def test_what_has_no_free_places_is_not_dealt_out_so() -> None:
    """Heads of one feature, which are no dimension of their own, and a bias per head."""
    plan = tpk.make_plan(zoo.Attention(4, 4), 3, example_inputs=torch.zeros(2, 7, 4))
    assert plan["qkv"].style == Column(gather_output=True)
    plan = tpk.make_plan(Attention("bias", 4), 3, example_inputs=torch.zeros(2, 5, WIDTH))
    assert plan["query"].style == plan["out"].style == Column(gather_output=True)


class Squeezing(zoo.Attention):
    """Right for every number of heads but one."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).squeeze(1)
        z: Tensor = self.proj(y.transpose(1, -2).reshape(batch, length, -1))
        return z


def test_a_model_that_fails_on_the_smallest_rank_alone_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 7, 40)
    assert tpk.make_plan(Squeezing(40, 10), 3, example_inputs=x)["proj"].style == Row(unit=4)  # 4, 4, 2
    assert tpk.make_plan(Squeezing(40, 10), 4, example_inputs=x)["proj"].style == Column(gather_output=True)
    for module in ("search", "whole_replays"):  # the fault: what holds for the first rank is taken to hold for all
        monkeypatch.setattr(f"tpkernels.planning.proofs.{module}.unlike_ranks", lambda roles, world_size: [0])
    assert tpk.make_plan(Squeezing(40, 10), 4, example_inputs=x)["proj"].style == Row(unit=4)


def test_ranks_are_alike_that_have_as_many_pieces_of_everything() -> None:
    def alike(*pieces: int) -> list[int]:
        return replay.unlike_ranks({str(count): replay.Role("row", (8 * count,), 0, count) for count in pieces}, 4)

    assert alike(0) == [0] and alike(10) == [0, 3] and alike(10, 6) == [0, 2, 3] and alike(5, 10) == [0, 1, 3]


def one_head_off(kind: type[ParallelLinear] | None) -> list[str]:
    """What is wrong with a model of whose layers ``kind`` is cut one head further than it should be."""
    plain, model = (zoo.Attention(40, 10).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if kind is not None:
            true = ParallelLinear._shard
            patch.setattr(
                kind, "_shard", lambda self, full, mesh, dim: true(self, full.roll(self.unit, dim), mesh, dim)
            )
        tpk.parallelize(model, tp_mesh(), tpk.make_plan(model, tp_mesh(), example_inputs=x))
    outputs = [net(x) for net in (model, plain)]
    for out in outputs:
        out.square().sum().backward()
    problem = differs(outputs[0], outputs[1], LIMIT[False])
    return compare_tensors(model, plain, LIMIT[False]) + ([f"output: {problem}"] if problem else [])


def verified() -> None:
    torch.manual_seed(0)
    for model, x in ((zoo.Attention(16, 4), torch.randn(2, 7, 16)), (Grouped("", 4), torch.randn(2, 5, WIDTH))):
        tpk.verify(model.double(), tp_mesh(), x.double()).check()


@pytest.mark.gloo
@pytest.mark.slow("2 s")
def test_free_places_and_packed_copies_are_verified(ranks: Pools) -> None:
    ranks(3).run(verified, timeout=LIMIT_S)


def faults() -> list[list[str]]:
    return [one_head_off(kind) for kind in (None, ColumnParallelLinear, RowParallelLinear)]


@pytest.mark.gloo
@pytest.mark.slow("4 s")
def test_the_comparison_catches_heads_that_are_one_off(ranks: Pools) -> None:
    for fine, *wrong in ranks(4).run(faults, timeout=LIMIT_S):
        assert not fine
        for found in wrong:
            assert any(one.startswith("output") for one in found) and any("gradient" in one for one in found), found


def test_few_heads_in_one_stage_are_gathered_where_another_stage_has_enough() -> None:
    """Swin's first stage has the fewest heads; it says nothing of how many ranks the model can have."""
    from transformers import SwinConfig, SwinModel

    sizes = {"image_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 8, "depths": [1, 1]}
    image = {"pixel_values": torch.zeros(1, 3, 16, 16)}
    plan = tpk.make_plan(SwinModel(SwinConfig(**sizes, num_heads=[2, 4])), 3, example_inputs=image)
    assert "2 heads do not divide" in plan["encoder.layers.0.blocks.0.attention.q_proj"].reason
    with pytest.raises(ValueError, match="3 ranks are more than the 2 heads"):
        tpk.make_plan(SwinModel(SwinConfig(**sizes, num_heads=[2, 2])), 3, example_inputs=image)
