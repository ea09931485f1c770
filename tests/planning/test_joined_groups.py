"""A layer that another projection gives to in each of two calls (Granite Docling): one group of all three."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

WIDTH, FEATURES = 4, 6
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3))
CALLS = [{"x": X, "fine": fine} for fine in (False, True)]


class Connector(nn.Module):
    """Two ways to the features that a last layer takes; or ``how`` the second one is not like the first."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.coarse, self.fine = nn.Linear(WIDTH, FEATURES), nn.Linear(WIDTH, FEATURES)
        self.last, self.how = nn.Linear(FEATURES, WIDTH), how

    def forward(self, x: Tensor, fine: bool = False) -> Tensor:
        y: Tensor = (self.fine if fine else self.coarse)(x)
        if fine and self.how == "turned":
            y = y.flip(-1)
        if fine and self.how == "packed":
            a, b = y.chunk(2, -1)
            y = torch.cat((a * b, a + b), -1)
        z: Tensor = self.last(F.gelu(y))
        return z


@pytest.mark.cpu
def test_both_projections_are_cut_up_to_the_layer_that_takes_them() -> None:
    plan = tpk.make_plan(Connector(), 3, example_inputs=CALLS)
    assert [plan[name].style for name in ("coarse", "fine", "last")] == [Column(), Column(), Row()]
    assert "up to last" in plan["coarse"].reason and "up to last" in plan["fine"].reason
    assert "coarse, fine" in plan["last"].reason


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["turned", "packed"])
def test_a_layer_stays_gathered_where_one_of_its_ways_is_not_proven(how: str) -> None:
    plan = tpk.make_plan(Connector(how), 2, example_inputs=CALLS)
    assert plan["coarse"].style != Column() and plan["fine"].style != Column() and plan["last"].style != Row()


@pytest.mark.cpu
def test_one_number_of_ranks_after_another_cuts_none() -> None:
    plan = tpk.make_plan(Connector(), 2, example_inputs=CALLS, same_bits=2)
    assert plan["last"].style != Row()


def by_value() -> list[str]:
    torch.manual_seed(1)
    plain = Connector().double()
    model = copy.deepcopy(plain)
    x = X.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        tpk.parallelize(model, tp_mesh(), example_inputs=[{"x": x, "fine": fine} for fine in (False, True)])
        outputs = [net(x, fine=True) + net(2 * x) for net in (model, plain)]
    for one in outputs:
        one.square().sum().backward()
    why = differs(*outputs, LIMIT)
    return ([f"output {why}"] if why else []) + compare_tensors(model, plain, LIMIT)


@pytest.mark.gloo
def test_both_ways_compute_and_train_as_before(ranks: Pools) -> None:
    assert ranks(2).run(by_value, timeout=LIMIT_S) == [[], []]
