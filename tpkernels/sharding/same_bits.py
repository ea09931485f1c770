"""Which plans give the same bits at every tensor-parallel degree, and the checks of ``parallelize`` for them.

A model does if it is cut in the same layers at every degree, all of whose ops do, and if nothing else depends on it.
So the plan must be the one for ``same_bits`` ranks, layer by layer; what is cut must be columns, rows, vocabularies and
features of experts, in so many blocks, at the same places, or whole experts, or channels of convolutions, which gather
their weights then; and masks of what is cut are those of blocks (:mod:`tpkernels.sharding.block_masks`).
Column layers check at each call that elementwise code behind them gives each element the same bits
(:func:`tpkernels.ops.same_bits.check_parts`).

Not proven, but measured: attention of a head does not depend on how many heads there are in the call (torch 2.13 on an
Intel Xeon of the Ice Lake generation, fused and eager, fp32 and bf16, forward and backward, by a script that is not
kept).  The models of ``tests/sharding/test_same_bits.py`` hold it at one shape.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import cast

from torch import nn

from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.planner import make_plan
from tpkernels.planning.splits import for_degrees, held
from tpkernels.planning.styles import Channels, Column, CopiedHeads, Experts, Replicate, Row, Style, Vocabulary

__all__ = ["check_plan", "check_styles"]

KEPT = (Column, CopiedHeads, Row, Vocabulary, Channels, Replicate, Experts)


def check_plan(plan: ShardingPlan, model: nn.Module, largest: int, example_inputs: object, experts: str) -> None:
    """Refuse a plan that is another one for ``largest`` ranks, or has what no blocks are known for.

    Raises:
        ValueError: names the module.
    """
    overrides = {glob.escape(entry.path): entry.style for entry in plan.entries if entry.source == "override"}
    if not plan.sequence_parallel:
        _check_sequence(overrides, largest, "an override")
    widest = make_plan(
        model, largest, strategy=plan.strategy, sequence_parallel=plan.sequence_parallel, overrides=overrides,
        example_inputs=example_inputs, experts=experts, same_bits=largest,
    )  # fmt: skip
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
    _check_places(plan, largest)


def _check_places(plan: ShardingPlan, largest: int) -> None:
    """Refuse a plan that was made for one number of ranks alone, where that cuts at other places."""
    with for_degrees(largest):
        for entry in plan.entries:
            for one in entry.parameters:
                if one.dim is None or isinstance(entry.style, Replicate | Channels):
                    continue
                if isinstance(entry.style, Experts) and entry.style.dealt:  # whole ones, wherever they are
                    continue
                total = one.shape[one.dim]
                if isinstance(entry.style, Vocabulary | Experts):
                    due = held(total, plan.world_size, _packed(entry.style, one.name))
                else:
                    due = cast(Column | Row, entry.style).local_features(total, plan.world_size)
                found = tuple(shape[one.dim] for shape in one.local_shapes)
                if found != due:
                    raise ValueError(
                        f"same_bits ({largest}): the plan cuts {one.name} of module {entry.path!r} into {list(found)}, "
                        f"and the blocks of {largest} ranks make {list(due)}: use make_plan(..., same_bits={largest})"
                    )


def _packed(style: Style, name: str) -> int:
    """How many features are cut together: gate and up where they are one parameter."""
    if not isinstance(style, Experts) or style.gate not in ("halves", "pairs"):
        return 1
    return 1 if name.removesuffix("_bias") == style.last else 2


def check_styles(styles: Mapping[str, Style], same_bits: int, *, by_hand: bool = True) -> None:
    """Refuse styles that no blocks are known for.

    ``by_hand``: nobody has proven where the sequence is whole and where a part.
    """
    if by_hand:
        _check_sequence(styles, same_bits, "a plan by hand")
    for name, style in styles.items():
        if isinstance(style, Column) and style.copied and not style.copies:
            raise ValueError(
                f"same_bits ({same_bits}): all queries of module {name!r} share its key and value, whose gradient a "
                "rank sums over all of its queries"
            )
        if getattr(style, "summed_gradient", False) or not getattr(style, "sum_input_gradient", True):
            raise ValueError(
                f"same_bits ({same_bits}): what module {name!r} gives or takes meets parts of several layers, and its "
                "gradient is summed over the ranks once for all of them, in no blocks"
            )
        if isinstance(style, Row) and style.segments:
            raise ValueError(
                f"same_bits ({same_bits}): module {name!r} takes parts of several segments, and its sums over these "
                "are in no blocks"
            )
        if isinstance(style, Column) and style.gather_input:
            raise ValueError(
                f"same_bits ({same_bits}): module {name!r} gathers this rank's features of what it takes, which are in "
                "no blocks"
            )
        if isinstance(style, Row) and style.scatter_unit:
            raise ValueError(
                f"same_bits ({same_bits}): module {name!r} gives this rank's features of what it sums, which are in no "
                "blocks"
            )
        if isinstance(style, Channels) and style.paired:
            raise ValueError(
                f"same_bits ({same_bits}): module {name!r} is a convolution of a pair, whose bits depend on the number "
                "of its channels"
            )
        if not isinstance(style, KEPT):
            raise ValueError(f"same_bits ({same_bits}): module {name!r} is cut as {style}, which is in no blocks")


def _check_sequence(styles: Mapping[str, Style], same_bits: int, what: str) -> None:
    """Refuse a module that takes or gives a part of the sequence, where no proof says which others do."""
    for name, style in styles.items():
        if getattr(style, "sequence_parallel", False):
            raise ValueError(
                f"same_bits ({same_bits}): module {name!r} works on a part of the sequence, and {what} does "
                "not say what else does: use make_plan(..., sequence_parallel=True), or sequence_parallel=False"
            )
