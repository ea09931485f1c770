"""Random shapes by the thousand, and that a shape whose bits differ can be found again."""

from __future__ import annotations

import pytest

from tests.ops import same_bits_trials
from tests.ops.same_bits_trials import Summary, compare, compare_all, draw, seeds_of, told
from tpkernels.testing.spawn import Pools


@pytest.mark.gloo
@pytest.mark.full("half an hour; a dozen shapes at 2 and 4 ranks stand for them")
def test_ten_thousand_random_shapes_give_the_bits_of_one_rank(ranks: Pools) -> None:
    (*_, summary) = compare_all(ranks, seeds_of(1, 10_000))
    assert summary.shapes == 10_000 and len(summary.kinds) == 15 and not summary.differences, summary.differences[:3]


@pytest.mark.gloo
def test_a_shape_whose_bits_differ_is_named_with_its_seed(ranks: Pools) -> None:
    summary, seeds = Summary(), [13, 20]
    compare(ranks, seeds, summary, largest=2, fault="a rank sums its part of K in one call")
    assert summary.shapes == 2 and summary.results > 4 and summary.differences
    for difference in summary.differences:
        assert any(difference.startswith(told(seed)) for seed in seeds) and " of 2 by " in difference


@pytest.mark.cpu
def test_the_shapes_of_a_run_are_of_every_kind() -> None:
    summary = Summary()
    for seed in seeds_of(1, 600):
        summary.add(seed, 1)
        assert draw(seed) == draw(seed)
    assert len(summary.kinds) == 15 and len(summary.dtypes) == 4 and len(summary.implementations) == 9, summary
    assert min(summary.kinds.values()) >= 8, summary.kinds
    assert {same_bits_trials.implementation_of(seed, 8) for seed in range(3)} == {"unfused", "chunked", "shared_memory"}
