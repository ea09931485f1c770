"""State spaces are cut by heads or channels, with convolution and scan on each rank's own."""

from __future__ import annotations

import warnings

import pytest
import torch

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tests.planning.state_spaces import HEADS, INNER, STATE, WIDTH, made
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.sliced import Cuts
from tpkernels.partition import copied_places
from tpkernels.planning.splits import Split
from tpkernels.planning.styles import Column, PartNorm, Replicate, Row, Sliced
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 4, WIDTH)
CUT = ("groups", "gate before", "gate after", "selective")


@pytest.mark.cpu
@pytest.mark.parametrize("how", [
    "gate before", "selective",
    *(pytest.param(how, marks=pytest.mark.slow("1 s; two others are quick")) for how in ("groups", "gate after")),
])  # fmt: skip
def test_a_state_space_is_cut_by_heads_or_channels(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    assert plan["out"].style == Row()
    if how == "selective":
        assert plan["first"].style == Column(segments=(INNER, INNER))
        assert plan["select"].style == Row(summed_gradient=True), "its sum goes into work on parts"
        assert plan["step"].style == Sliced((("bias", 0), ("weight", 0))), "its weight is read, from the left"
        assert plan["conv"].style == Sliced((("bias", 0), ("weight", 0)))
        assert plan[""].style == Sliced((("decay", 0), ("gain", 0)))
        assert plan["norm"].style == Replicate(sequence_parallel=True)
        return
    groups = 2 if how == "groups" else 1
    runs, copies = (INNER, groups * STATE, groups * STATE), {} if how == "groups" else {"copied": 2}
    behind = {"behind": 1} if copies else {}
    assert plan["first"].style == Column(segments=(INNER, *runs, HEADS), **copies, **behind)
    both = (("bias", 0), ("weight", 0)), (("bias", runs), ("weight", runs))
    assert plan["conv"].style == Sliced(*both, **copies)
    if how == "gate before":  # a buffer as well
        scale = (("scale", (INNER, *runs, HEADS)),)
        assert plan[""].style == Sliced((("decay", 0), ("scale", 2), ("step", 0)), scale, **copies, **behind)
    else:
        assert plan[""].style == Sliced((("decay", 0), ("step", 0)))
    gated = PartNorm(1e-5, how.removeprefix("gate ")) if copies else Sliced((("weight", 0),))
    assert plan["norm"].style == gated
    channels = 3 * INNER // 6 + 2 * STATE if copies else INNER // 2 + 2 * STATE
    each = {"channels": (INNER + 2 * groups * STATE, (channels, channels)), "heads": (HEADS, (3, 3))}
    each |= {"inner": (INNER, (12, 12))} | ({} if copies else {"groups": (2, (1, 1))})
    assert plan.attributes == each
    again = tpk.ShardingPlan.from_json(plan.to_json())
    assert again == plan


@pytest.mark.cpu
@pytest.mark.parametrize("how", [
    "what all heads read leaves", "layer called",
    *(
        pytest.param(how, marks=pytest.mark.slow("3 s; every guess is tried"))
        for how in ("selection that leaves",)
    ),
])  # fmt: skip
def test_what_only_looks_like_one_is_not_cut(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    assert plan["out"].style in (Column(gather_output=True), Row(split_input=True))
    assert not any(isinstance(entry.style, PartNorm | Sliced) for entry in plan.entries)


@pytest.mark.cpu
@pytest.mark.slow("3 s each: every guess is tried")
@pytest.mark.parametrize("how", ["centred", "another gate"])
def test_a_norm_of_another_kind_takes_its_means_over_all_ranks(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    assert plan["out"].style == Row() and plan["norm"].style == Sliced((("weight", 0),))
    assert "norm" in plan.statistics


@pytest.mark.cpu
def test_copied_segments_may_have_others_behind_them() -> None:
    packed = Split(2, (24, 5, 5, 6), copied=2, behind=1)
    assert packed.cut_segments == (24, 6) and packed.local_segments(2, 0) == (12, 5, 5, 3)
    assert packed.part(24, 40, 2, 0) == (Split(2, (5, 5, 6), copied=2, behind=1), 12, 25)
    assert packed.part(0, 34, 2, 0) == (Split(2, (24, 5, 5), copied=2), 0, 22)
    assert packed.part(34, 40, 2, 1) == (Split(2, (6,)), 22, 25)
    assert packed.part(26, 31, 2, 1) == (Split(2, (5,), copied=1), 14, 19), "any range of what every rank has"
    style = Column(segments=(24, 5, 5, 6), copied=2, behind=1)
    assert style.local_features(40, 2) == (25, 25)
    cuts = Cuts({"weight": 0}, {"weight": (24, 5, 5, 6)}, 2, 1)
    assert cuts.parts("weight", 1, 2) == [(12, 12), (0, 5), (0, 5), (3, 3)]
    for copied, behind in ((4, 0), (2, 3), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="must be fewer than the segments"):
            copied_places(4, copied, behind)


def all_by_value() -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # each first call is followed, with rules for these layouts
        hows = (*CUT, "centred", "another gate") if tp_mesh().size() == 2 else CUT[1:]  # two groups are for two ranks
        return [
            problem for how in hows for problem in problems(how, made(how), torch.randn(2, 4, WIDTH).double(), "out")
        ]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [3, 2])
@pytest.mark.slow("3 s; that they are cut is asked without training")
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    wanted = [[]] * world
    assert ranks(world).run(all_by_value, timeout=LIMIT_S) == wanted
