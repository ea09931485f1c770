"""RecurrentGemma on ranks, with the states that its recurrence keeps: tokens, steps and training as unsharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tpkernels as tpk
from tests.models.architectures.reference import computing
from tests.models.architectures.shrink import small_config
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import tp_mesh
from tpkernels.testing.spawn import Pools

LIMIT = 1e-9
NEW = 8


def built() -> Any:
    """A recurrent block and an attention, with weights that all count."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(3)
    model: Any = RecurrentGemmaForCausalLM(small_config(RecurrentGemmaConfig, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.double().eval()


def words(batch: int, length: int) -> Tensor:
    return torch.randint(7, 90, (batch, length), generator=torch.Generator().manual_seed(batch))


def told(model: Any, batch: int) -> Tensor:
    """What it says greedily, with its cache."""
    kwargs = {"do_sample": False, "use_cache": True, "disable_compile": True}
    found: Tensor = model.generate(words(batch, 5), max_new_tokens=NEW, min_new_tokens=NEW, **kwargs)
    return found


def stepped(model: Any) -> list[Tensor]:
    """Logits of a beginning, and of one word after another."""
    from transformers import DynamicCache

    cache, ids = DynamicCache(config=model.config), words(3, 8)
    places = [slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 8)]
    return [
        model(ids[:, at], position_ids=torch.arange(8)[None, at], use_cache=True, cache=cache).logits for at in places
    ]


def answers() -> list[str]:
    wrong: list[str] = []
    with computing(torch.float64, doubles=True):
        plain = built()
        model = copy.deepcopy(plain)
        plan = tpk.make_plan(model, tp_mesh())
        if len(plan.kept) != 2:
            wrong.append(f"kept are {dict(plan.kept)}")
        tpk.parallelize(model, tp_mesh(), plan)
        with torch.no_grad():
            for batch in (3, 2):
                tokens = [told(net, batch) for net in (model, plain)]
                if not torch.equal(*tokens) or tokens[0].shape[1] != 5 + NEW:
                    wrong.append(f"tokens of {batch}: {tokens}")
        for net in (model, plain):
            net.train()
            net(words(2, 7), labels=words(2, 7), use_cache=False).loss.backward()
        wrong += compare_tensors(model, plain, LIMIT)
        for net in (model, plain):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.eval()
        with torch.no_grad():
            for number, pair in enumerate(zip(stepped(model), stepped(plain), strict=True)):
                wrong += [f"step {number} after training: {why}" for why in [differs(*pair, LIMIT)] if why]
    return wrong


@pytest.mark.gloo
@pytest.mark.slow("40 s: RecurrentGemma with its states, on 2 ranks")
def test_recurrent_gemma_says_and_learns_with_its_states_what_it_does_unsharded(ranks: Pools) -> None:
    assert ranks(2).run(answers, timeout=400) == [[], []]
