"""`parallelize(..., same_bits=4)` of experts of every kind that plans cut: 1, 2 and 4 ranks give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tpkernels as tpk
from tests.planning.test_experts import H, Mixed, Model, NormBehind, OwnGate
from tests.planning.test_other_experts import IdentityModel, RowsModel, SharedModel, SortedModel
from tests.sharding.test_same_bits import small_groups
from tpkernels.comm.groups import resolve
from tpkernels.errors import UnsupportedProblem
from tpkernels.nn.gathering import gathered
from tpkernels.planning.styles import Experts
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

SAME_BITS = 4


class OfSilu(OwnGate):
    """Whose last elements a vectorised loop computes in another way than the rest."""

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return F.silu(gate.contiguous()) * up


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(Model, Mixed), "own gate": partial(Model, OfSilu), "behind": partial(Model, NormBehind),
    "all": SharedModel, "identity": IdentityModel, "sorted": SortedModel, "rows": RowsModel,
}  # fmt: skip
FEATURES = [(kind, "features") for kind in KINDS if kind != "rows"]
DEALT = [(kind, "experts") for kind in ("plain", "own gate", "behind", "all", "rows")]


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return KINDS[kind]()


def differing(cases: list[tuple[str, str]], tokens: int, plan: str | None = None) -> list[str]:
    """What differs between the degrees: outputs, gradients and their norm, before and after a step.

    ``plan``: how all of the model is cut; by default its experts alone, as a plan for all degrees says.
    """
    wrong = []
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(4))
    for kind, experts in cases:
        options: dict[str, Any] = {"example_inputs": x, "experts": experts, "same_bits": SAME_BITS}
        found = tpk.make_plan(made(kind), SAME_BITS, **options).styles
        styles = {name: style for name, style in found.items() if isinstance(style, Experts)}
        assert len(styles) == (2 if kind == "sorted" else 1), found
        assert all(style.dealt == (experts == "experts") for style in styles.values())
        expected: list[Tensor] = []
        for degree, group in small_groups(SAME_BITS).items():
            results = trained(tpk.parallelize(made(kind), group, plan=plan or styles, **options), x)
            expected = expected or results
            wrong += [
                f"result {i} of {kind} by {experts} on {degree} ranks"
                for i, (one, other) in enumerate(zip(results, expected, strict=True))
                if not torch.equal(one, other)
            ]
    return wrong


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(2):
        y = cast(Tensor, model(x))
        y.square().mean().backward()
        found += [y.detach(), *(gathered(cast(Tensor, parameter.grad)).clone() for parameter in model.parameters())]
        found.append(tpk.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_gate_of_the_models_own_has_the_bits_of_one_rank(ranks: Pools) -> None:
    """Also where last elements are there: it sees whole blocks, and whole experts."""
    for wrong in ranks(2).run(differing, [("own gate", "features"), ("own gate", "experts")], 61, timeout=120.0):
        assert not wrong


def test_experts_on_a_mesh_of_two_axes_are_refused(ranks: Pools) -> None:
    ranks(2).run(check_refusal)


def check_refusal() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    resolve(mesh["tp"]).keep_same_bits(SAME_BITS)
    experts = tpk.nn.ParallelExperts(4, 8, 16, mesh, layout="experts")
    with pytest.raises(UnsupportedProblem, match="a mesh of two axes for experts does not give the same bits"):
        experts(torch.ones(6, 8), tpk.Routing(torch.zeros(6, 1).long(), torch.ones(6, 1)))


@pytest.mark.slow("plans of eleven models at three numbers of ranks")
def test_plans_of_experts_of_every_kind_give_the_bits_of_one_rank(ranks: Pools) -> None:
    for wrong in ranks(4).run(differing, FEATURES + DEALT, 64, "auto", timeout=300.0):
        assert not wrong
