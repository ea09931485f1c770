"""Parallelized models in use: optimizers and clipping, bf16, torch.compile, activation checkpointing, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh, whole
from tests.sharding import zoo
from tests.sharding.compare import LIMIT, compare_tensors, differs, parts_of
from tpkernels.demo import minilm
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo


def pair(name: str, dtype: torch.dtype = torch.float64, sequence: bool = False, **changes: Any) -> Any:
    plain, model = zoo.build(name, dtype, **changes), zoo.build(name, dtype, **changes)
    plan = tpk.make_plan(model, tp_mesh(), sequence_parallel=sequence)
    return plain, tpk.parallelize(model, tp_mesh(), plan), zoo.inputs(name, dtype)


def loss_of(model: nn.Module, given: dict[str, Any]) -> Tensor:
    return zoo.output(model(**given)).square().mean()


def trains(name: str, sequence: bool) -> list[str]:
    """20 steps of AdamW with clipping, next to the unsharded model."""
    plain, model, given = pair(name, sequence=sequence)
    optimizers = [torch.optim.AdamW(net.parameters(), 0.01) for net in (plain, model)]
    wrong: list[str] = []
    # AdamW divides by the gradient's size: the rounding of a gradient that is almost 0 becomes a step of full size.
    limit = 100 * LIMIT[zoo.is_single(name)]
    for step in range(20):
        norms = []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(net, given).backward()
            norms.append(whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3)))
            optimizer.step()
        problem = differs(norms[1], norms[0], limit)
        if problem:
            wrong.append(f"norm of step {step}: {problem}")
    return wrong + compare_tensors(model, plain, limit, gradients=False)


def many_train(cases: list[tuple[str, bool]]) -> list[list[str]]:
    return [trains(name, sequence) for name, sequence in cases]


@pytest.mark.parametrize(("world", "names"), [(2, ("gpt2", "llama", "bert")), (3, ("qwen2", "opt"))])
def test_twenty_steps_of_adamw_with_clipping_equal_those_of_one_process(
    ranks: Pools, world: int, names: tuple[str, ...], full: bool
) -> None:
    cases = [(name, sequence) for name in (zoo.FAMILIES if full else names) for sequence in (False, True)]
    for mine in ranks(world).run(many_train, cases, timeout=3 * LIMIT_S):
        assert not any(mine), dict(zip(cases, mine, strict=True))


def own_error(name: str, sequence: bool) -> tuple[float, float]:
    """In bf16: how far the parallel model and the unsharded one are from fp64, relative, over output and gradients."""
    exact, given64 = zoo.build(name), zoo.inputs(name)
    loss_of(exact, given64).backward()
    plain, model, given = pair(name, torch.bfloat16, sequence)
    errors = []
    for net in (plain, model):
        y = zoo.output(net(**given))
        y.float().square().mean().backward()
        expected = [zoo.output(exact(**given64)).detach()]
        actual = [y.detach()]
        for key, parameter in exact.named_parameters():
            found = parts_of(net, key) if net is model else [dict(net.named_parameters())[key]]
            if len(found) == 1 and parameter.grad is not None:
                expected.append(parameter.grad)
                actual.append(whole(found[0].grad))  # type: ignore[arg-type]
        differences = [(a.double() - e).norm() / e.norm() for a, e in zip(actual, expected, strict=True)]
        errors.append(max(float(d) for d in differences if d.isfinite()))
    return errors[1], errors[0]


@pytest.mark.parametrize("sequence", [False, True])
def test_bf16_is_as_exact_as_the_unsharded_model_in_bf16(ranks: Pools, sequence: bool) -> None:
    for parallel, plain in ranks(2).run(own_error, "bert", sequence, timeout=LIMIT_S):
        assert parallel <= 2 * plain, (parallel, plain)


def compiled(name: str, sequence: bool) -> list[str]:
    plain, model, given = pair(name, sequence=sequence)
    loss_of(plain, given).backward()
    fast = torch.compile(model, backend="aot_eager")
    loss = loss_of(fast, given)  # type: ignore[arg-type]
    loss.backward()
    problem = differs(loss, loss_of(plain, given), LIMIT[True])
    return ([f"loss: {problem}"] if problem else []) + compare_tensors(model, plain, LIMIT[True])


@pytest.mark.parametrize("sequence", [False, True])
def test_a_parallelized_model_compiles(ranks: Pools, sequence: bool) -> None:
    for wrong in ranks(2).run(compiled, "llama", sequence, timeout=2 * LIMIT_S):
        assert not wrong


def checkpointed(name: str, sequence: bool) -> list[str]:
    plain, model, given = pair(name, sequence=sequence)
    for net in (plain, model):
        net.train()
        net.gradient_checkpointing_enable({"use_reentrant": False})
        loss_of(net, given).backward()
    return compare_tensors(model, plain, LIMIT[True])


@pytest.mark.parametrize("sequence", [False, True])
def test_activation_checkpointing_keeps_the_gradients(ranks: Pools, sequence: bool) -> None:
    for wrong in ranks(2).run(checkpointed, "llama", sequence, timeout=LIMIT_S):
        assert not wrong


class Dropping(nn.Module):
    """Dropout before, within and after a column and its row; gives what each left."""

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


def residual_dropout(name: str) -> list[str]:
    """Dropout of what all ranks have draws the unsharded model's numbers."""
    changes = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.3}
    plain, model, given = pair(name, **changes)
    for net in (plain, model):
        net.train()
        torch.manual_seed(5)
        loss_of(net, given).backward()
    return compare_tensors(model, plain, LIMIT[True])


def test_dropout_outside_of_parts_is_the_unsharded_models(ranks: Pools) -> None:
    for wrong in ranks(2).run(residual_dropout, "bert", timeout=LIMIT_S):
        assert not wrong


def sequence_dropout(name: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """With a cut residual: the loss, the next random number, gradients of what is replicated."""
    _, model, given = pair(name, sequence=True)
    model.train()
    torch.manual_seed(5)
    loss = loss_of(model, given)
    loss.backward()
    grads = [whole(p.grad) for p in model.parameters() if p.grad is not None and p.placements[0].is_replicate()]
    return loss.detach(), torch.rand(()), grads


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_after_dropout_on_a_residual_that_is_cut(ranks: Pools, world: int) -> None:
    """At 3 ranks attention works on the whole sequence in between, with the numbers that all ranks share."""
    (loss, number, grads), *others = ranks(world).run(sequence_dropout, "gpt2", timeout=LIMIT_S)
    for other in others:
        assert torch.equal(loss, other[0]) and torch.equal(number, other[1])
        assert all(torch.equal(a, b) for a, b in zip(grads, other[2], strict=True))


def embeds(sequence: bool) -> tuple[float, float, float]:
    """MiniLM with a plan that is found: the largest difference from the unsharded model, and that one's own error."""
    from tpkernels.demo.sentences import SENTENCES

    folder = minilm.weights_folder()
    plain, tokenizer = minilm._load(folder)
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    expected = minilm.embed(plain, tokens)
    exact = minilm.embed(plain.double(), tokens)
    model, _ = minilm._load(folder)
    plan = tpk.make_plan(model, tp_mesh(), sequence_parallel=sequence)
    tpk.parallelize(model, tp_mesh(), plan)
    actual = minilm.embed(model, tokens)
    rows = [entry for entry in plan.entries if type(entry.style).__name__ == "Row"]
    assert len(rows) == 12, "two rows in each of six blocks"
    share = plan.bytes_per_rank[dist.get_rank()] / plan.full_bytes
    own = float((expected.double() - exact).abs().max())
    return float((actual.double() - exact).abs().max()), own, share


@pytest.mark.parametrize("sequence", [False, True])
def test_the_pretrained_minilm_embeds_as_before(ranks: Pools, sequence: bool) -> None:
    try:
        minilm.weights_folder()
    except minilm.Missing as missing:
        pytest.skip(str(missing))
    for difference, own, share in ranks(2).run(embeds, sequence, timeout=LIMIT_S):
        assert difference <= minilm.BOUND_FACTOR * own
        assert share < 0.51
