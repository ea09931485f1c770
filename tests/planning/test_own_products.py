"""Modules whose code multiplies by parameters of their own are cut by these, as by the weights of layers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.by_value import problems
from tests.planning.own_products import EACH, WIDTH, Attention, Mlp, Model
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.parameter_products import product_of
from tpkernels.planning.styles import Replicate, Row, Sliced
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 5, WIDTH)
CUT = ("", "heads first", "two streams", "mlp")
DIMS = {
    "": (("bias", 0), ("k", 1), ("o", 1), ("q", 1), ("v", 1)),
    "heads first": (("bias", 0), ("k", 1), ("o", 0), ("q", 1), ("v", 1)),
    "mlp": (("bias", 0), ("down", 1), ("up", 1)),
}


@pytest.mark.cpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", CUT)
def test_parameters_are_cut_by_heads_and_with_what_these_meet(how: str, world: int) -> None:
    plan = tpk.make_plan(Model(how), world, example_inputs=X)
    for block in ("blocks.0", "blocks.1"):
        assert plan[block].style == Sliced(DIMS.get(how, DIMS[""]))
        assert plan.products[block] == (("down", "up") if how == "mlp" else ("k", "o", "q", "v"))
    assert plan["last"].style == Row() and not plan.random
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(Model(how))


@pytest.mark.cpu
def test_the_plan_says_what_is_multiplied_and_sent() -> None:
    plan = tpk.make_plan(Model(), 3, example_inputs=X)
    # The gradients of x of the three first products (x itself needs none), and the sum of the last.
    assert plan.product_bytes == (2 * 4 * X.numel() * 2 // 3) * (1 + 3 + 1)
    assert plan.wire_bytes == plan.product_bytes + sum(entry.wire_bytes or 0 for entry in plan.entries)
    said = " ".join(str(plan).split())
    assert "products with parts: k, o, q, v of blocks.[0-1] (x2), which sends 2.6 KiB" in said, said
    with pytest.raises(ValueError, match=r"'blocks\.0' multiplies by 'types', which is not cut"):
        dataclasses.replace(plan, products={"blocks.0": ("types",)}).validate(Model())
    with pytest.raises(ValueError, match="product_bytes of a plan has a value of another kind"):
        tpk.ShardingPlan.from_json(dataclasses.replace(plan, product_bytes=-1).to_json())


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["over heads", "one head more", "of twice", "read as well", "leaves", "handed in"])
def test_what_is_not_of_each_head_keeps_the_module_whole(how: str) -> None:
    plan = tpk.make_plan(Model(how), 2, example_inputs=X)
    assert isinstance(plan["blocks.0"].style, Replicate) and not plan.products
    assert plan["last"].style == Row()


@pytest.mark.cpu
def test_a_parameter_of_two_modules_is_cut_in_neither() -> None:
    assert not tpk.make_plan(Model("tied"), 2, example_inputs=X).products


@pytest.mark.cpu
def test_heads_that_do_not_divide_are_not_cut() -> None:
    assert not tpk.make_plan(Model(heads=5), 3, example_inputs=X).products
    plan = tpk.make_plan(Model(heads=EACH), 2, example_inputs=X)  # as many as features of each
    assert plan["blocks.0"].style == Sliced(DIMS[""])


@pytest.mark.cpu
def test_sums_of_products_are_in_no_blocks() -> None:
    assert not tpk.make_plan(Model(), 2, example_inputs=X, same_bits=2).products


@pytest.mark.cpu
def test_a_module_that_is_asked_to_stay_whole_does() -> None:
    plan = tpk.make_plan(Model(), 2, example_inputs=X, overrides={"blocks.0": "replicate"})
    assert [*plan.products] == ["blocks.1"]


@pytest.mark.cpu
def test_dropout_between_products_differs_by_rank() -> None:
    plan = tpk.make_plan(Model(p=0.5), 2, example_inputs=X)
    assert plan.random == (("blocks.0.q", "blocks.0.o"), ("blocks.1.q", "blocks.1.o"))


@pytest.mark.cpu
def test_a_product_has_a_letter_for_each_dimension() -> None:
    x, w = torch.zeros(2, 3), torch.zeros(3, 4)
    found = product_of(torch.einsum, ("ab, bc -> ac", x, w), {})
    assert found is not None and [found.place(0), found.place(1)] == [(True, 1), (False, 1)]
    kept = product_of(torch.einsum, ("ab,bc->abc", x, w), {})
    assert kept is not None and kept.place(0) is None
    others: list[tuple[Any, ...]] = [
        ("ab,bc", x, w), ("...b,bc->...c", x, w), ("aa,ab->b", x[:, :2], x), ("ab->a", x), ("ab,bc,c->a", x, w, w[0]),
    ]  # fmt: skip
    assert not any(product_of(torch.einsum, args, {}) for args in others)
    assert product_of(torch.matmul, ("ab,bc->ac", x, w), {}) is None


def by_value() -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # the first call is followed, with rules for these layouts
        return [p for how in CUT for p in problems(how, Model(how), torch.randn(2, 5, WIDTH).double(), "last")]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int) -> None:
    assert ranks(world).run(by_value, timeout=LIMIT_S) == [[]] * world


def otherwise() -> list[str]:
    """Calls with a parameter that the plan has seen no use of."""
    found = []
    for model in (nn.Sequential(Mlp(2)), nn.Sequential(Attention(heads=4))):
        model = tpk.parallelize(model.double(), tp_mesh(), example_inputs=X.double())
        try:
            model[0](torch.randn(2, 5, WIDTH).double(), types=True)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


@pytest.mark.gloo
def test_a_call_that_the_plan_was_not_proven_for_raises(ranks: Pools) -> None:
    for one, other in ranks(2).run(otherwise, timeout=LIMIT_S):  # torch repeats the one feature of a rank
        assert "takes 2 in dimension 2, and this rank has 1 of down" in one and "must match the size" in other


def with_types() -> list[str]:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(heads=4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.model(x, types=True)
            return y

    torch.manual_seed(0)
    return problems("types", Typed(), torch.randn(2, 5, WIDTH).double(), "model.last")


@pytest.mark.gloo
def test_a_call_like_the_example_is_right(ranks: Pools) -> None:
    assert ranks(2).run(with_types, timeout=LIMIT_S) == [[], []]


def dropped() -> tuple[list[list[bool]], list[float]]:
    """What each block of this rank drops, and numbers that are drawn behind a pass, and behind one that raises."""
    torch.manual_seed(0)
    plain = Model(p=0.5).double()
    model = tpk.parallelize(plain, tp_mesh(), example_inputs=X.double())
    masks = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        masks.append((output == 0).flatten().tolist())

    note.takes_parts = True  # type: ignore[attr-defined]
    for block in model.blocks:
        block.drop.register_forward_hook(note)
    torch.manual_seed(1)
    x = torch.randn(2, 5, WIDTH).double()
    y = model(x)
    after = [y.sum().item(), torch.rand(()).item()]
    model.eval()
    model(x)
    return masks[:2], [*after, torch.rand(()).item()]


@pytest.mark.gloo
def test_ranks_draw_other_numbers_between_products_and_the_same_behind(ranks: Pools) -> None:
    (first, numbers), (second, others) = ranks(2).run(dropped, timeout=LIMIT_S)
    assert numbers == others and len(first) == len(second) == 2
    assert all(mine != its for mine, its in zip(first, second, strict=True))
