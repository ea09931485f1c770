"""Attention whose code reads the width of its input to view its heads is cut, where it does no more with the input.

So does the code of nanoGPT (``B, T, C = x.size()``), BLIP, MGP-STR and many a vision transformer.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import LIMIT, problems
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.shown_width import ShownWidth, show_width
from tpkernels.planning.modules.numbers import number_of, owner_of, width_in, width_name
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

HEADS, EACH = 4, 4
WIDTH = HEADS * EACH
X = torch.zeros(2, 5, WIDTH)
ROW = "attention.out"


class Attention(nn.Module):
    """ "split": as nanoGPT's code takes packed projections apart; else as timm's does.

    "scaled": by the whole width; "residual": the input is added; "normed": a norm takes it; "handed": it is returned.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads, self.width = how, HEADS, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.norm = nn.Linear(WIDTH, 1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        if self.how == "split":
            parts = self.qkv(x).split(self.width, dim=2)
            q, k, v = (y.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for y in parts)
        else:
            packed = self.packed(self.norm(x) if self.how == "normed" else x)
            q, k, v = packed.reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width**-0.5 if self.how == "scaled" else (width // self.heads) ** -0.5)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        if self.how == "gated":
            y = y * self.gate(x).sigmoid()
        if self.how == "residual":
            y = y + x
        return (y, x) if self.how == "handed" else y

    def packed(self, x: Tensor) -> Tensor:
        y: Tensor = self.qkv(x)
        return y


class Recomputing(Attention):
    """Calls a layer anew in the backward pass, when nobody says any more what it takes in place of what is shown."""

    def packed(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.qkv, x, use_reentrant=False)
        return y


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        kind = Recomputing if how == "recomputing" else Attention
        self.first, self.attention, self.last = nn.LayerNorm(WIDTH), kind(how), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.first(x))
        return x + (y[0] + self.last(y[1]) if isinstance(y, tuple) else y)


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["timm", "split", "gated"])
def test_heads_are_cut_where_code_reads_the_width_of_its_input(how: str) -> None:
    plan = tpk.make_plan(Block(how), 2, example_inputs=X)
    assert plan["attention.qkv"].style == Column(segments=(WIDTH,) * 3) and plan[ROW].style == Row()
    layers = "qkv, gate" if how == "gated" else "qkv"
    assert plan.attributes[f"attention.width(x: {layers})"] == (WIDTH, (WIDTH // 2, WIDTH // 2))
    assert f"attribute attention.width(x: {layers}): 16 -> 8" in str(plan)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Block(how))
    other = Block(how)
    other.attention.qkv = nn.Linear(2 * WIDTH, 3 * WIDTH)
    with pytest.raises(ValueError, match="plan"):
        plan.validate(other)


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["scaled", "residual", "normed", "handed", "recomputing"])
def test_code_that_does_more_with_its_input_is_not_shown_another_width(how: str) -> None:
    block = Block(how)
    for model, row in ((block, ROW), (block.attention, "out")):
        plan = tpk.make_plan(model, 2, example_inputs=X)
        assert plan[row].style == Column(gather_output=True) and not plan.attributes


@pytest.mark.cpu
def test_a_width_is_a_number_of_a_module_by_its_argument_and_layers() -> None:
    name = width_name("x", ["self.query", "key"])
    assert name == "width(x: self.query, key)" and width_in(name) == ("x", ("self.query", "key"))
    assert width_in("heads") is None and owner_of(f"a.0.{name}", {"a.0"}) == ("a.0", name)
    assert owner_of(name, {""}) == ("", name)
    module = Attention("timm")
    assert number_of(module, "width(x: qkv, gate)") == WIDTH and number_of(module, "width(x: other)") is None


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor | None = None) -> Any:
        if x is None:
            return None
        if x.shape[-1] > 3:
            raise RuntimeError("wide")
        return x.shape[-1], self.layer(x), self.layer(input=x), self.other(x)


@pytest.mark.cpu
def test_a_module_is_shown_a_width_and_its_layers_take_the_whole_tensor() -> None:
    module, x = Told(), torch.randn(2, 7)
    show_width(module, "x", [module.layer], 3)
    for one in (module, copy.deepcopy(module)):
        for call in (one(x), one(x=x)):
            assert call[0] == 3 and call[1] is x and call[2] is x and call[3].shape == (2, 3)
        assert one() is None and one.layer(x) is x
        assert not _held(one), "a call that is over holds nothing"
    with pytest.raises(ValueError, match=r"x must be a tensor with more than 3 features, got \[2, 3\]"):
        module(x[:, :3])


def _held(module: nn.Module) -> list[Tensor]:
    shown = [hook.__self__ for hook in module._forward_pre_hooks.values()]  # type: ignore[attr-defined]
    assert all(isinstance(one, ShownWidth) for one in shown)
    return [value for one in shown for value in vars(one).values() if isinstance(value, Tensor)]


def by_value(*hows: str) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        return [
            problem for how in hows for problem in problems(how, Block(how), torch.randn(2, 5, WIDTH).double(), ROW)
        ]


@pytest.mark.gloo
def test_it_computes_and_trains_as_the_unsharded_model(ranks: Pools) -> None:
    assert ranks(2).run(by_value, "split", timeout=LIMIT_S) == [[], []]


@pytest.mark.gloo
@pytest.mark.slow("3 s; the same with uneven heads")
def test_heads_that_do_not_divide_have_widths_of_their_own(ranks: Pools) -> None:
    assert ranks(3).run(by_value, "split", "timm", "gated", timeout=LIMIT_S) == [[]] * 3


def along_the_sequence(compiled: bool) -> list[str]:
    torch.manual_seed(0)
    plain, x = nn.Sequential(Block("timm"), Block("split")).double(), torch.randn(2, 6, WIDTH).double()
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=x, sequence_parallel=not compiled)
    tpk.parallelize(model, tp_mesh(), plan)
    found = [] if plan.sequence_parallel != compiled and plan[f"1.{ROW}"].style.__class__ is Row else [str(plan)]
    run: Any = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        outputs = [run(x), plain(x)]
        for out in outputs:
            out.square().sum().backward()
        found += [problem] if (problem := differs(*outputs, LIMIT)) else []
    return found + compare_tensors(model, plain, LIMIT)


@pytest.mark.gloo
@pytest.mark.slow("6 s; two blocks in sequence parallel, or compiled")
@pytest.mark.parametrize("compiled", [False, True])
def test_it_goes_with_sequence_parallel_and_with_a_compiler(ranks: Pools, compiled: bool) -> None:
    assert ranks(2).run(along_the_sequence, compiled, timeout=LIMIT_S) == [[], []]
