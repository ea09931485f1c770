"""Layers are known by what they do: subclasses that keep torch's forward are cut, all others are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.modules.layers import is_attention, kind_of, layer_of, unswappable
from tpkernels.testing.spawn import Pools

WIDTH, HIDDEN = 6, 14


class Config:
    """Mixed in behind nn.Module, as torchtitan's modules are."""

    flavour = "plain"

    def init_states(self) -> str:
        return f"of {type(self).__name__}"


class KeptLinear(nn.Linear, Config):
    scale_of_init = 0.5

    def __init__(self, in_features: int, out_features: int, *, note: str = "none") -> None:
        super().__init__(in_features, out_features)
        self.note = note

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.scale_of_init)
        nn.init.zeros_(self.bias)

    def describe(self) -> str:
        return f"{self.note}, {self.flavour}, {self.out_features}"


class KeptEmbedding(nn.Embedding):
    pass


class KeptAttention(nn.MultiheadAttention):
    def describe(self) -> int:
        return self.num_heads


class OtherForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight * 2, self.bias)


class ReadsBeside(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.sum()


class OtherCall(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1


class OtherAttributes(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) * 2 if name == "weight" else super().__getattr__(name)


class OtherConversion(nn.Linear):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self


class MoreParameters(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(1))


class MoreBuffers(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros(1))


class MoreModules(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inner = nn.ReLU()


class OtherAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


OTHERS = (
    OtherForward,
    ReadsBeside,
    OtherCall,
    OtherAttributes,
    OtherConversion,
    MoreParameters,
    MoreBuffers,
    MoreModules,
    NonDynamicallyQuantizableLinear,
)


@pytest.mark.cpu
def test_a_subclass_that_keeps_torchs_forward_is_a_layer() -> None:
    for kind in (nn.Linear, KeptLinear):
        found = layer_of(kind(3, 5))
        assert found is not None and (found.kind, found.in_features, found.out_features) == ("linear", 3, 5)
        assert kind_of(kind(3, 5)) == "Linear"
    found = layer_of(KeptEmbedding(7, 4))
    assert found is not None and found.kind == "embedding" and kind_of(KeptEmbedding(7, 4)) == "Embedding"
    assert is_attention(KeptAttention(4, 2)) and is_attention(nn.MultiheadAttention(4, 2))


@pytest.mark.cpu
def test_a_subclass_with_behaviour_of_its_own_is_none() -> None:
    assert [kind.__name__ for kind in OTHERS if layer_of(kind(3, 5)) is not None] == []
    assert not is_attention(OtherAttention(4, 2))
    assert layer_of(nn.LazyLinear(5)) is None
    assert layer_of(nn.utils.parametrizations.weight_norm(KeptLinear(3, 5))) is None


@pytest.mark.cpu
def test_a_class_that_was_given_another_forward_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: input)
    assert layer_of(nn.Linear(3, 5)) is None and layer_of(KeptLinear(3, 5)) is None
    assert layer_of(nn.Embedding(3, 5)) is not None
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda self, *args: args[0])
    assert not is_attention(nn.MultiheadAttention(4, 2))


@pytest.mark.cpu
def test_attributes_with_names_of_a_parallel_layer_are_a_reason_not_to_swap() -> None:
    layer = KeptLinear(3, 5)
    assert unswappable(layer) is None
    layer.gather_output = True  # type: ignore[assignment]
    why = unswappable(layer)
    assert why is not None and "['gather_output']" in why


class Model(nn.Module):
    def __init__(self, linear: Any = KeptLinear, embedding: Any = KeptEmbedding) -> None:
        super().__init__()
        self.embedding = embedding(11, WIDTH)
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def compare(plan: Any) -> list[str]:
    torch.manual_seed(0)
    plain = Model().double()
    plain.up.note = "first"
    model = copy.deepcopy(plain)
    ids = torch.arange(10).view(2, 5)
    if plan == "auto":
        plan = tpk.make_plan(model, tp_mesh(), example_inputs=ids)
        plan.validate(Model(nn.Linear, nn.Embedding).double())  # the same behaviour
    tpk.parallelize(model, tp_mesh(), plan)
    styles = {name: type(module).__mro__ for name, module in model.named_modules()}
    assert tpk.nn.ColumnParallelLinear in styles["up"] and tpk.nn.RowParallelLinear in styles["down"], styles
    up: Any = model.up
    assert up.describe() == f"first, plain, {HIDDEN}" and up.scale_of_init == 0.5
    assert up.init_states() == "of ColumnParallelLinear"
    model = copy.deepcopy(model)
    y, expected = model(ids), plain(ids)
    for out in (y, expected):
        out.square().sum().backward()
    problem = differs(y, expected, 1e-11)
    return ([problem] if problem else []) + compare_tensors(model, plain, 1e-11)


@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["auto", "explicit"])
def test_subclasses_are_cut_and_keep_what_they_added(ranks: Pools, plan: Any) -> None:
    plan = {"up": "column", "down": "row", "embedding": "vocabulary"} if plan == "explicit" else plan
    assert ranks(2).run(compare, plan, timeout=LIMIT_S) == [[], []]


def refused() -> list[str]:
    found = []
    for kind in (OtherForward, MoreParameters):
        model = nn.Sequential(kind(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
        try:
            tpk.parallelize(model, tp_mesh(), {"0": "column", "1": "row"})
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.gloo
def test_a_plan_that_names_a_subclass_of_another_behaviour_is_refused(ranks: Pools) -> None:
    for messages in ranks(2).run(refused, timeout=LIMIT_S):
        assert len(messages) == 2 and all("own behaviour would be lost" in message for message in messages)


def attention_subclass() -> list[str]:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"attention": KeptAttention(8, 4, batch_first=True, dtype=torch.float64)})
    model = copy.deepcopy(plain)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    from tpkernels.planning.styles import Heads

    tpk.parallelize(model, tp_mesh(), {"attention": Heads()})
    attention: Any = model["attention"]
    assert isinstance(attention, tpk.nn.ParallelMultiheadAttention) and attention.describe() == 4
    problem = differs(attention(x, x, x)[0], plain["attention"](x, x, x)[0], 1e-11)
    return [problem] if problem else []


@pytest.mark.gloo
def test_a_subclass_of_torchs_attention_has_its_heads_cut(ranks: Pools) -> None:
    assert ranks(2).run(attention_subclass, timeout=LIMIT_S) == [[], []]
