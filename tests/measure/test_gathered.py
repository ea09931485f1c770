"""What ranks show each other at the end of a command comes back as it was, and something else is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
import torch

from tests.reliability.crew import Link, together
from tpkernels.measure.curves import Curve
from tpkernels.measure.gathered import from_all_ranks, from_plain, to_plain
from tpkernels.measure.netlab import Sample
from tpkernels.measure.report import CaseResult
from tpkernels.measure.timing import Measurement
from tpkernels.measure.trace import Event, RankTrace
from tpkernels.measure.training import RankResult


class _Pair(NamedTuple):
    number: int
    word: str


@dataclass(frozen=True)
class _Value:
    pair: _Pair
    kind: Literal["a", "b"]
    maybe: float | None = None
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)


VALUES: tuple[tuple[Any, Any], ...] = (
    (_Value(_Pair(3, "three"), "b", 0.1, {"x": (1, 2), "": ()}), _Value),
    (_Value(_Pair(-1, ""), "a"), _Value),
    (CaseResult("op", "1x2x3", "bfloat16", 2, {"gemm": Measurement("gemm", (0.1, 1e-9))}, 5, "chunked", 4), CaseResult),
    (RankResult({"alone": Curve([1.0, math.inf], [2.5], [0.1], 7)}, [], torch.bfloat16), RankResult),
    ([RankTrace(0, "call", 1, 2**60, [Event("g", "gemm", 1, 2, 3, 4)], [Sample(1, 2, 3)])], list[RankTrace]),
    ([("a", 1), ("b", 2)], list[tuple[str, int]]),
    (True, bool),
)


@pytest.mark.cpu
@pytest.mark.parametrize(("value", "kind"), VALUES, ids=lambda one: type(one).__name__)
def test_values_come_back_as_they_were(value: Any, kind: Any) -> None:
    assert from_plain(kind, json.loads(json.dumps(to_plain(value)))) == value


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (_Value, {"pair": [1, "x"], "kind": "c", "maybe": None, "names": {}}),
        (_Value, {"pair": [1, "x"], "kind": "a", "maybe": None}),
        (_Value, {"pair": [1, "x"], "kind": "a", "maybe": None, "names": {}, "more": 1}),
        (_Value, {"pair": [1], "kind": "a", "maybe": None, "names": {}}),
        (_Value, [1, "x"]),
        (torch.dtype, "load"),
        (list[int], {"a": 1}),
        (list[int], ["1"]),
        (tuple[int, str], [1]),
        (int, True),
        (int, 1.0),
        (str, None),
    ],
)
def test_what_is_no_such_value_is_refused(kind: Any, said: Any) -> None:
    with pytest.raises(ValueError, match="which is no"):
        from_plain(kind, said)


@pytest.mark.cpu
def test_what_has_no_words_is_not_shown() -> None:
    with pytest.raises(TypeError, match="set"):
        to_plain({"a": {1, 2}})


def _show(link: Link) -> list[_Value]:
    return from_all_ranks(_Value(_Pair(link.rank, "x" * 100 * link.rank), "a", maybe=0.1 * link.rank))


@pytest.mark.gloo
def test_every_rank_gets_those_of_all() -> None:
    expected = [_Value(_Pair(rank, "x" * 100 * rank), "a", maybe=0.1 * rank) for rank in range(3)]
    assert together(3, _show, within=60.0) == [expected] * 3
