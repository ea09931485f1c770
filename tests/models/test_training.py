"""Parallelized models in use: dropout's random numbers, errors in between, pretrained weights (also: test_grid.py)."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models import zoo
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh, whole
from tpkernels.demo import minilm
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo


def pair(name: str, dtype: torch.dtype = torch.float64, sequence: bool = False, **changes: Any) -> Any:
    plain, model = zoo.build(name, dtype, **changes), zoo.build(name, dtype, **changes)
    plan = plan_once(model, tp_mesh(), sequence_parallel=sequence)
    return plain, tpk.parallelize(model, tp_mesh(), plan), zoo.inputs(name, dtype)


def loss_of(model: nn.Module, given: dict[str, Any]) -> Tensor:
    return zoo.output(model(**given)).square().mean()


class Dropping(nn.Module):
    """Dropout before, within and after a column and its row; gives what each left."""

    takes_parts = True  # hidden

    def __init__(self, within: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 1001), nn.Linear(1001, 8)
        self.within = nn.Dropout(within)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.dropout(x, 0.5, self.training)
        self.hidden = self.within(self.up(before))
        y = self.down(self.hidden)
        self.after = torch.dropout(torch.ones_like(y), 0.5, self.training)
        return y * self.after


def drops(within: float) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Dropping(within).double()
    with torch.no_grad():
        model.up.bias.fill_(1000.0)  # so that only dropout makes a zero
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=torch.zeros(5, 8, dtype=torch.float64))
    tpk.parallelize(model, tp_mesh(), plan).train()
    x = torch.ones(5, 8, dtype=torch.float64)
    torch.manual_seed(11)
    passes = [checkpoint(model, x, use_reentrant=False) for _ in range(2)]
    masks = [model.hidden.detach() == 0, model.after.detach() == 0]
    for y in passes:
        y.sum().backward()  # runs the forward pass again
    again = model.hidden.detach() == 0
    return {
        "pairs": plan.random,
        "y": [y.detach() for y in passes],
        "hidden": masks[0],
        "after": masks[1],
        "again": again,
        "next": torch.rand(()),
    }


def test_dropout_differs_on_parts_and_is_equal_on_what_all_ranks_have(ranks: Pools) -> None:
    """1001 features over 2 ranks: they draw different amounts for their parts, and agree afterwards all the same."""
    first, second = ranks(2).run(drops, 0.5, timeout=LIMIT_S)
    assert first["pairs"] == (("up", "down"),)
    assert torch.equal(first["after"], second["after"]) and first["after"].any() and not first["after"].all()
    assert torch.equal(first["next"], second["next"])
    assert all(torch.equal(a, b) for a, b in zip(first["y"], second["y"], strict=True))
    assert not torch.equal(*first["y"])
    size = second["hidden"].shape[-1]
    assert 0.4 < first["hidden"].double().mean() < 0.6 and 0.4 < second["hidden"].double().mean() < 0.6
    same = first["hidden"][:, :size] == second["hidden"]
    assert 0.4 < same.double().mean() < 0.6, "independent masks agree on half of their elements"
    assert first["again"].shape == first["hidden"].shape


class Interleaved(nn.Module):
    """Two pairs that run side by side, each with dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.first, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.dropout(self.up(x), 0.5, self.training)
        b = torch.dropout(self.first(x), 0.5, self.training)
        y: Tensor = self.down(a) + self.last(b)
        return torch.dropout(y, 0.5, self.training)


def drops_side_by_side() -> dict[str, Any]:
    torch.manual_seed(3)
    model = Interleaved().double()
    x = torch.ones(5, 8, dtype=torch.float64)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=x)
    tpk.parallelize(model, tp_mesh(), plan).train()
    torch.manual_seed(11)
    y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    return {"pairs": plan.random, "y": y.detach(), "dx": x.grad, "next": torch.rand(())}


def test_ranks_agree_after_pairs_with_dropout_that_interleave(ranks: Pools) -> None:
    """The second begins within the first and ends behind it."""
    one, other = ranks(2).run(drops_side_by_side, timeout=LIMIT_S)
    assert one["pairs"] == (("up", "down"), ("first", "last"))
    assert all(torch.equal(one[what], other[what]) for what in ("y", "dx", "next"))


def drops_compiled() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    model = Dropping(0.5).double()
    x = torch.ones(5, 8, dtype=torch.float64)
    tpk.parallelize(model, tp_mesh(), tpk.make_plan(model, tp_mesh(), example_inputs=x)).train()
    passes = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        torch.manual_seed(11)
        passes.append(run(x).detach())
    return passes[0], passes[1]


@pytest.mark.full("seconds of compiling")
def test_a_compiled_model_drops_what_the_model_drops(ranks: Pools) -> None:
    for eager, compiled in ranks(2).run(drops_compiled, timeout=2 * LIMIT_S):
        assert torch.equal(eager, compiled) and eager.any()


def fails_once(repair: bool) -> tuple[Tensor, Tensor]:
    """A pass that raises between the column and its row; the masks of the next pass, and the number after it."""
    torch.manual_seed(3)
    model = Dropping(0.5)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs=torch.zeros(5, 8))
    tpk.parallelize(model, tp_mesh(), plan).train()
    if not repair:
        repairs = [key for key, hook in model._forward_hooks.items() if "leave_on_errors" in hook.__qualname__]
        del model._forward_hooks[repairs[0]]
    torch.manual_seed(11)
    handle = model.within.register_forward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(torch.ones(5, 8))
    handle.remove()
    model(torch.ones(5, 8))
    return model.after.detach(), torch.rand(())


def test_random_numbers_are_shared_again_after_a_pass_that_raised(ranks: Pools) -> None:
    (mask, number), (other_mask, other_number) = ranks(2).run(fails_once, True, timeout=LIMIT_S)
    assert torch.equal(mask, other_mask) and torch.equal(number, other_number)
    (_, number), (_, other_number) = ranks(2).run(fails_once, False, timeout=LIMIT_S)
    assert not torch.equal(number, other_number), "without the repair ranks drift apart, which this test must see"


def sequence_dropout(name: str) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """With a cut residual: the loss, the next random number, gradients of what is replicated; what parts have lost."""
    lost: list[Tensor] = []
    drop = nn.Dropout.forward

    def look(module: nn.Dropout, x: Tensor) -> Tensor:
        output = drop(module, x)
        lost.append((output.to_local() if isinstance(output, DTensor) else output).detach() == 0)
        return output

    _, model, given = pair(name, sequence=True)
    model.train()
    with mock.patch.object(nn.Dropout, "forward", look):
        torch.manual_seed(5)
        loss = loss_of(model, given)
    loss.backward()
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None and p.placements[0].is_replicate()]
    length = given["input_ids"].shape[1]
    return loss.detach(), torch.rand(()), grads, [mask for mask in lost if mask.shape[1] < length]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_ranks_agree_after_dropout_on_a_residual_that_is_cut(ranks: Pools, world: int) -> None:
    """At 3 ranks attention works on the whole sequence in between, with the numbers that all ranks share."""
    (loss, number, grads, lost), *others = ranks(world).run(sequence_dropout, "gpt2", timeout=LIMIT_S)
    for other in others:
        assert torch.equal(loss, other[0]) and torch.equal(number, other[1])
        assert all(torch.equal(a, b) for a, b in zip(grads, other[2], strict=True))
        for mine, theirs in zip(lost, other[3], strict=True):  # parts of other lengths, perhaps
            length = min(mine.shape[1], theirs.shape[1])
            assert mine.any() and not torch.equal(mine[:, :length], theirs[:, :length])
    assert lost


def embeds(sequence: bool) -> tuple[float, float, float]:
    """MiniLM with a plan that is found: the largest difference from the unsharded model, and that one's own error."""
    from tpkernels.demo.sentences import SENTENCES

    folder = minilm.weights_folder()
    plain, tokenizer = minilm._load(folder)
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    expected = minilm.embed(plain, tokens)
    exact = minilm.embed(plain.double(), tokens)
    model, _ = minilm._load(folder)
    plan = plan_once(model, tp_mesh(), sequence_parallel=sequence)
    tpk.parallelize(model, tp_mesh(), plan)
    actual = minilm.embed(model, tokens)
    rows = [entry for entry in plan.entries if type(entry.style).__name__ == "Row"]
    assert len(rows) == 12, "two rows in each of six blocks"
    share = plan.bytes_per_rank[dist.get_rank()] / plan.full_bytes
    own = float((expected.double() - exact).abs().max())
    return float((actual.double() - exact).abs().max()), own, share


@pytest.mark.full("tests/demo does the same through the command")
@pytest.mark.parametrize("sequence", [False, True])
def test_the_pretrained_minilm_embeds_as_before(ranks: Pools, sequence: bool) -> None:
    try:
        minilm.weights_folder()
    except minilm.Missing as missing:
        pytest.skip(str(missing))
    for difference, own, share in ranks(2).run(embeds, sequence, timeout=LIMIT_S):
        assert difference <= minilm.BOUND_FACTOR * own
        assert share < 0.51
