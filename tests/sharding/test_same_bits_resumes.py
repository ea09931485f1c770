"""With `same_bits`, a mixture of experts that is saved at one number of ranks goes on at another with the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.ops.same_bits import assert_same
from tests.sharding.same_bits_models import MODELS, Step
from tests.sharding.test_same_bits import SAME_BITS, small_groups
from tpkernels.nn.gathering import gathered
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


class Training:
    """A Mixtral, of which ``seed`` chooses the first weights, and its AdamW."""

    def __init__(self, group: Any, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        model, options, step = MODELS["mixtral"](dtype)
        self.step: Step = step
        self.model: nn.Module = tpk.parallelize(model, group, same_bits=SAME_BITS, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)

    def steps(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Losses, norms and gradients of these steps, and the parameters afterwards; whole."""
        found: dict[str, Tensor] = {}
        for number in numbers:
            ids = torch.randint(96, (8, 25), generator=torch.Generator().manual_seed(number))
            loss = self.step(self.model, ids)
            loss.backward()
            found[f"loss {number}"] = loss.detach()
            for name, parameter in self.model.named_parameters():
                found[f"gradient {number} of {name}"] = gathered(cast(Tensor, parameter.grad)).clone()
            found[f"norm {number}"] = tpk.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found | tpk.full_state_dict(self.model)


@pytest.mark.slow("builds six Mixtrals on each of four ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_resumed_from_2_to_4_ranks_goes_on_with_the_same_bits(
    ranks: Pools, dtype: torch.dtype, tmp_path: Path
) -> None:
    for compared, wrong in ranks(4).run(check_resumes, dtype, tmp_path, timeout=300.0):
        assert compared > 100 and not wrong, wrong[:3]


@pytest.mark.slow("the same, that it can fail")
def test_a_snapshot_of_other_weights_is_noticed(ranks: Pools, tmp_path: Path) -> None:
    for _, wrong in ranks(2).run(check_resumes, torch.float32, tmp_path, True, timeout=300.0):
        assert any("resumed from 1" in one and "experts" in one for one in wrong)


def check_resumes(dtype: torch.dtype, folder: Path, fault: bool = False) -> tuple[int, list[str]]:
    """At 1, 2 and 4 ranks: two steps, a snapshot, two more; and the last two from the snapshot of half of the ranks.

    ``fault``: one number of one expert is another one in what was loaded.
    """
    expected: dict[str, Tensor] = {}
    compared, wrong = 0, list[str]()
    for degree, group in small_groups(SAME_BITS).items():
        training, resumed = (Training(group, dtype, seed) for seed in (7, 8))
        training.steps(range(2))
        tpk.save_snapshot(training.model, training.optimizer, folder / str(degree))
        runs = {f"{degree} ranks": training}
        if degree > 1:
            tpk.load_snapshot(resumed.model, resumed.optimizer, folder / str(degree // 2))
            runs[f"{degree} ranks, resumed from {degree // 2}"] = resumed
            if fault:
                changed = next(p for name, p in resumed.model.named_parameters() if "experts" in name)
                with torch.no_grad():
                    cast(Any, changed).to_local().view(-1)[0] += 1
        for what, run in runs.items():
            found = run.steps(range(2, 4))
            expected = expected or found
            assert found.keys() == expected.keys()
            for name, value in found.items():
                compared += 1
                try:
                    assert_same(value, expected[name], f"{name} on {what}")
                except AssertionError as error:
                    wrong.append(str(error))
    return compared, wrong
