"""torch's optimizers on a parallelized model: those that step it as an unsharded one, and what the others say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import LIMIT, compare_tensors
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD")
REFUSED = {
    "Adafactor": "in-place operations that require placement changes",
    "Rprop": "in-place operations that require placement changes",
    "LBFGS": "Cannot flatten unevenly sharded tensor",
    "Muon": "only supports 2D parameters",
}
"""By torch itself, before any parameter has changed."""


def nets(name: str) -> tuple[dict[str, Any], nn.Module, nn.Module]:
    """The inputs, the unsharded model and, with heads as a dimension of their own where they do not divide, ours."""
    plain, model, given = zoo.build(name), zoo.build(name), zoo.inputs(name)
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh(), example_inputs=given))
    return given, plain, model


def steps(name: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], count: int = 3) -> list[str]:
    """What differs after some steps of both."""
    given, plain, model = nets(name)
    for net in (plain, model):
        optimizer = make(list(net.parameters()))

        def loss(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            found = zoo.output(net(**given)).square().mean()
            found.backward()
            return found

        for _ in range(count):
            optimizer.step(loss)  # type: ignore[arg-type]
    return compare_tensors(model, plain, LIMIT[False], gradients=False)


class OwnNorm(torch.optim.SGD):
    """The fault: a step in units of the gradient's norm, of which it takes this rank's part for the whole."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for parameter in self.param_groups[0]["params"]:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            grad.div_(grad.norm() + 1e-3)
        super().step()


def made(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name)
    # With the usual eps the rounding of a gradient that is 0, as that of keys' biases, becomes a step.
    options = {"eps": 1e-4} if name in ELEMENTWISE and "eps" in inspect.signature(kind).parameters else {}
    return kind(parameters, lr=0.01, **options)


def elementwise() -> dict[str, list[str]]:
    wrong = {name: steps("attention 10", functools.partial(made, name)) for name in ELEMENTWISE}
    return wrong | {"fault": steps("attention 10", lambda p: OwnNorm(p, lr=0.01))}


@pytest.mark.slow("4 s: every optimizer of torch")
def test_elementwise_optimizers_step_as_on_the_unsharded_model(ranks: Pools) -> None:
    for wrong in ranks(3).run(elementwise, timeout=LIMIT_S):
        assert wrong.pop("fault")
        assert wrong.keys() == set(ELEMENTWISE) and not any(wrong.values()), wrong


def refusals() -> dict[str, str]:
    said = {}
    for name in REFUSED:
        try:
            said[name] = str(steps("attention 10", functools.partial(made, name)))
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)
    return said


def test_torch_refuses_where_an_optimizer_asks_more_of_a_parameter_than_dtensors_offer(ranks: Pools) -> None:
    for said in ranks(3).run(refusals, timeout=LIMIT_S):
        for name, text in REFUSED.items():
            assert text in said[name], (name, said[name])


def muon(name: str, count: int) -> list[str]:
    """Of the matrices alone, in fp64: its own bf16 rounds sums over ranks otherwise than whole ones."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count(".bfloat16()") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", None)
        exec(source.replace(".bfloat16()", ".double()"), vars(_muon))  # the patch puts the true one back
        return steps(name, lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=0.01), count)


def test_muon_takes_matrices_cut_unevenly_as_whole_ones(ranks: Pools) -> None:
    for wrong in ranks(3).run(muon, "mlp", 3, timeout=LIMIT_S):
        assert not wrong, wrong


def test_muon_takes_the_parts_of_a_packed_layer_for_matrices_of_their_own(ranks: Pools) -> None:
    for wrong in ranks(2).run(muon, "attention 10", 1, timeout=LIMIT_S):  # five heads each: no dimension for them
        assert {one.split(":")[0] for one in wrong} == {"qkv.weight"}, wrong
