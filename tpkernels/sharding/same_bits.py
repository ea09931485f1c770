"""Which plans give the same bits at every tensor-parallel degree, and the checks of ``parallelize`` for them.

A model does if it is cut in the same layers at every degree, all of whose ops do, and if nothing else depends on it.
So the plan must be the one for ``same_bits`` ranks, layer by layer; what is cut must be columns, rows and vocabularies,
which divide into so many blocks, or channels of convolutions, which gather their weights then; and masks of what is cut
are those of blocks (:mod:`tpkernels.sharding.block_masks`).
Column layers check at each call that elementwise code behind them gives each element the same bits
(:func:`tpkernels.ops.same_bits.check_parts`).

Not proven, but measured: attention of a head does not depend on how many heads there are in the call (torch 2.13 on an
Intel Xeon of the Ice Lake generation, fused and eager, fp32 and bf16, forward and backward, by a script that is not
kept).  The models of ``tests/sharding/test_same_bits.py`` hold it at one shape.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpkernels.planning.plan import ShardingPlan
from tpkernels.planning.planner import make_plan
from tpkernels.planning.styles import Channels, Column, Replicate, Row, Style, Vocabulary

__all__ = ["check_plan", "check_styles"]

KEPT = (Column, Row, Vocabulary, Channels, Replicate)


def check_plan(plan: ShardingPlan, model: nn.Module, largest: int, example_inputs: object, experts: str) -> None:
    """Refuse a plan that is another one for ``largest`` ranks, or has what no blocks are known for.

    Raises:
        ValueError: names the module.
    """
    widest = make_plan(
        model, largest, sequence_parallel=plan.sequence_parallel, example_inputs=example_inputs, experts=experts
    )
    for name, style in plan.styles.items():
        other = widest.styles.get(name)
        if other != style:
            raise ValueError(
                f"same_bits ({largest}): module {name!r} would be {style} on {plan.world_size} ranks and {other} on "
                f"{largest}: {widest[name].reason if other is not None else 'not in that plan'}"
            )
    if plan.random != widest.random:
        raise ValueError(
            f"same_bits ({largest}): ranks draw numbers of their own between the layers {plan.random} on "
            f"{plan.world_size} ranks and {widest.random} on {largest}"
        )
    if plan.shared != widest.shared:
        raise ValueError(
            f"same_bits ({largest}): layers that share an input are {plan.shared} on {plan.world_size} ranks and "
            f"{widest.shared} on {largest}"
        )
    for what in ("sequence_blocks", "whole_blocks", "local_blocks", "sequence_random"):
        mine, others = getattr(plan, what), getattr(widest, what)
        if mine != others:
            raise ValueError(
                f"same_bits ({largest}): the sequence is cut in another way, {what} are {mine} on {plan.world_size} "
                f"ranks and {others} on {largest}"
            )
    check_styles(plan.styles, largest, by_hand=False)


def check_styles(styles: Mapping[str, Style], same_bits: int, *, by_hand: bool = True) -> None:
    """Refuse styles that no blocks are known for.

    ``by_hand``: nobody has proven where the sequence is whole and where a part.
    """
    for name, style in styles.items():
        if by_hand and getattr(style, "sequence_parallel", False):
            raise ValueError(
                f"same_bits ({same_bits}): module {name!r} works on a part of the sequence, and a plan by hand does "
                "not say what else does: use make_plan(..., sequence_parallel=True), or sequence_parallel=False"
            )
        if not isinstance(style, KEPT):
            raise ValueError(f"same_bits ({same_bits}): module {name!r} is cut as {style}, which is in no blocks")
