"""Whether a model that a plan cuts computes and trains as the unsharded one, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import tp_mesh
from tpkernels.planning.styles import Row

LIMIT = 1e-11


def problems(what: str, plain: nn.Module, x: Tensor, row: str) -> list[str]:
    """What differs, and that ``row`` is not one in the plan; outputs, all gradients and the state in original names."""
    plain = plain.double()
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=x)
    found = [] if isinstance(plan[row].style, Row) else [f"{what} is not cut"]
    tpk.parallelize(model, tp_mesh(), plan)
    model = copy.deepcopy(model)
    inputs: list[Any] = [x, x.clone()]
    if x.is_floating_point():
        inputs = [one.requires_grad_() for one in inputs]
    outputs = []
    for net, one in zip((model, plain), inputs, strict=True):
        torch.manual_seed(1)  # for dropout of whole tensors
        outputs.append(net(one))
        outputs[-1].square().sum().backward()
    pairs = {"output": (outputs[0], outputs[1])}
    if x.is_floating_point():
        pairs["gradient of x"] = (inputs[0].grad, inputs[1].grad)
    found += [f"{what} {name}: {why}" for name, (a, b) in pairs.items() if (why := differs(a, b, LIMIT))]
    state = tpk.full_state_dict(model)
    found += [f"{what} {k}" for k, value in plain.state_dict().items() if not torch.equal(state[k], value)]
    return found + [f"{what} {problem}" for problem in compare_tensors(model, plain, LIMIT)]
