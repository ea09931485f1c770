"""What users do to a model after ``parallelize``: ``.to()``, ``.half()``, ``.to_empty()``, ``copy.deepcopy``.

The model has a parameter of every kind (cut, packed, of heads that do not divide, of copied heads, of torch's
attention, tied, replicated) and a buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.styles import Column, CopiedHeads, Heads, Row
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HIDDEN, HEAD, WORDS = 12, 14, 6, 11
LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 0.05, torch.bfloat16: 0.3}
PLAN: dict[str, Any] = {
    "packed": Column(segments=(HIDDEN, HIDDEN)),
    "down": "row",
    "uneven": Column(unit=3),
    "out": Row(unit=3),
    "key": CopiedHeads(heads=1, copies=2),
    "key_out": "row",
    "attention": Heads(),
    "embedding": "vocabulary",
    "head": "column_gather",
}


class Every(nn.Module):
    copies = 2

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.packed, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.uneven, self.out = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.key, self.key_out = nn.Linear(WIDTH, HEAD), nn.Linear(2 * HEAD, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids)) * self.scale + self.shift
        gate, up = self.packed(x).chunk(2, -1)
        x = x + self.down(torch.tanh(gate) * up) + self.out(self.uneven(x))
        x = x + self.key_out(torch.cat([self.key(x)] * self.copies, -1))
        y: Tensor = self.head(x + self.attention(x, x, x)[0])
        return y


def refilled(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """On the meta device and back, with the values of a plain checkpoint put in."""
    model.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.load_state_dict(values)
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to float64": lambda model: model.to(torch.float64),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "half and back": lambda model: model.half().float(),
    "to cpu": lambda model: model.to("cpu"),
    "deepcopy": copy.deepcopy,
    "deepcopy, double": lambda model: copy.deepcopy(model).double(),
    "frozen": lambda model: model.requires_grad_(False),
}


def step(model: nn.Module) -> Tensor:
    ids = torch.arange(10).view(2, 5)
    y: Tensor = model(ids)
    if y.requires_grad:
        y.double().square().sum().backward()
    return y.detach()


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Every()
    model = copy.deepcopy(plain)
    tpk.parallelize(model, tp_mesh(), PLAN)
    model.copies = 1  # what a plan of ours would set: this rank has one of the two
    return plain, model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in model.state_dict().items()
    }


def wrong_after(name: str, trained: bool = False) -> list[str]:
    plain, model = pair()
    names, state = list(model.state_dict()), whole_state(model)
    if trained:  # gradients are converted, too
        step(plain), step(model)
    if name == "to meta and back":
        model = refilled(model, state)
    else:
        plain, model = CHANGES[name](plain), CHANGES[name](model)
    wrong = []
    if list(model.state_dict()) != names:
        wrong.append(f"state_dict has {list(model.state_dict())}, had {names}")
    dtype = next(plain.parameters()).dtype
    for key, tensor in whole_state(model).items():
        if not torch.equal(tensor, state[key].to(dtype if name != "half and back" else torch.float16).to(dtype)):
            wrong.append(f"{key} has other values, or {tensor.dtype} instead of {dtype}")
    every: Any = model
    if every.head.weight is not every.embedding.weight:
        wrong.append("the tie is gone")
    for key, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.to_local().dtype != dtype or not parameter.is_leaf:
            wrong.append(f"{key} is a {type(parameter).__name__} of {parameter.dtype}")
    limit = LIMITS[torch.float32 if trained else dtype]  # of the step before the conversion
    problem = differs(step(model), step(plain), limit)
    wrong += [f"output: {problem}"] if problem else []
    wrong += compare_tensors(model, plain, 10 * limit)
    if name == "frozen" and any(parameter.grad is not None for parameter in model.parameters()):
        wrong.append("a frozen parameter has a gradient")
    return [f"{name}{' after a step' if trained else ''}: {text}" for text in wrong]


def wrong_after_all() -> list[str]:
    found = [text for name in (*CHANGES, "to meta and back") for text in wrong_after(name)]
    return found + wrong_after("double", trained=True)


@pytest.mark.slow("3 s")
def test_a_parallelized_model_can_be_converted_copied_and_frozen(ranks: Pools) -> None:
    assert ranks(2).run(wrong_after_all, timeout=LIMIT_S) == [[], []]


def wrong_when_swapped() -> list[str]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return wrong_after("double")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_conversion_that_swaps_parameters_in_place_works_too(ranks: Pools) -> None:
    assert ranks(2).run(wrong_when_swapped, timeout=LIMIT_S) == [[], []]
