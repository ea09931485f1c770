"""Experts that have other parameters, or are called otherwise, than most: what they compute decides here, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tests.planning.test_experts import E, H, Mixed, Model, N
from tpkernels.planning.modules.experts import Refused, find_experts, layout_of
from tpkernels.planning.styles import Experts

pytestmark = pytest.mark.cpu


class Sorted(nn.Module):
    """One matrix for each expert, which takes rows in the order of their experts, as in JetMoE."""

    def __init__(self, features: int = N, hidden: int = H) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(E, features, hidden))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, self.matrices, strict=True)])


class _OthersMatrix(Sorted):
    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        return super().forward(rows.flip(0), counts[::-1])


class _Router(nn.Module):
    """Tokens and weights of the rows in the order of their experts, and how many each expert has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.layer(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        return order // 2, weights.flatten()[order], F.one_hot(chosen, E).sum((0, 1)).tolist()


class SortedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.up, self.down = nn.Linear(H, H), _Router(), Sorted(), Sorted(H, N)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        tokens, weights, counts = self.router(x)
        y = self.down(F.silu(self.up(x[tokens], counts)), counts)
        return x.index_add(0, tokens, y * weights[:, None])


def test_one_matrix_for_each_expert_is_cut_and_its_rows_gathered() -> None:
    assert not any(find_experts(_OthersMatrix()))
    plan = tpk.make_plan(SortedModel(), 3, example_inputs=torch.ones(4, H))
    for name, (features, hidden) in {"up": (N, H), "down": (H, N)}.items():
        entry = plan[name]
        assert isinstance(entry.style, Experts) and entry.style.call == "sorted", entry.reason
        assert [shape[1] for shape in entry.parameters[0].local_shapes] == ([4, 4, 4] if name == "up" else [3, 3, 2])
        assert (entry.forward, entry.backward) == ("all-gather of y", "all-reduce of dx")
        assert entry.wire_bytes == 4 * 2 * (features + 2 * hidden) * 4 * 2 // 3
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=r"cannot cut 'up' \(and 1 more\): its experts have one matrix here"):
        tpk.make_plan(SortedModel(), 2, example_inputs=torch.ones(4, H), experts="experts")
    with pytest.raises(ValueError, match="one matrix each, 'first', are cut by features"):
        Experts("first", last="", call="sorted", dealt=True)


class _Shared(Mixed):
    """Every token goes to all experts, which are summed in fp32, as the shared experts of Inkling."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        flat, weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1, self.down.shape[0])  # type: ignore[index, operator]
        each = [self.product("down", self.middle(flat, e) * weights[:, e, None], e) for e in range(weights.shape[1])]
        return torch.stack(each).float().sum(0).to(x.dtype).view(x.shape)


class _SharedOtherwise(_Shared):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, weights.flip(-1))


class SharedModel(Model):
    def __init__(self) -> None:
        super().__init__(_Shared)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        y = self.experts(x.unflatten(0, (1, -1)), self.router(x).softmax(-1))
        return x + y.flatten(0, 1)


def test_experts_that_take_all_tokens_are_known() -> None:
    assert layout_of(_Shared("separate")).layout.call == "all"
    with pytest.raises(Refused):
        layout_of(_SharedOtherwise())
    entry = tpk.make_plan(SharedModel(), 2, example_inputs=torch.ones(4, H))["experts"]
    assert isinstance(entry.style, Experts) and entry.backward == "all-reduce of dx, dr", entry.reason
    assert entry.wire_bytes == 2 * (2 * 4 * H * 4 + 4 * E * 4) // 2


class _WithIdentity(Mixed):
    """Two experts give what they take, as in LongCat-Flash, which has a first matrix for them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E + 2, 2 * N, H))

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        idle = (weights * (chosen >= self.down.shape[0])).sum(1, keepdim=True)  # type: ignore[index, operator]
        return super().forward(hidden_states, chosen, weights) + idle * hidden_states


class _WithZeros(_WithIdentity):
    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return Mixed.forward(self, hidden_states, chosen, weights)


class IdentityModel(Model):
    def __init__(self) -> None:
        super().__init__(_WithIdentity)
        self.router = nn.Linear(H, E + 2)


def test_experts_that_give_what_they_take_are_known() -> None:
    assert not any(find_experts(_WithZeros()))
    entry = tpk.make_plan(IdentityModel(), 2, example_inputs=torch.ones(4, H))["experts"]
    assert isinstance(entry.style, Experts) and entry.style.identity, entry.reason
    assert [one.local_shapes[0] for one in entry.parameters] == [(E + 2, N, H), (E, H, N // 2)]
    with pytest.raises(ValueError, match="cannot cut 'experts': some experts have no matrices"):
        tpk.make_plan(IdentityModel(), 2, example_inputs=torch.ones(4, H), experts="experts")
    with pytest.raises(ValueError, match="are cut by features, not dealt out"):
        Experts(identity=True, dealt=True)


class _Rows(nn.Module):
    """All experts in the rows of matrices, as in DBRX."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w1", "v1", "w2"):
            self.register_parameter(name, nn.Parameter(torch.randn(4 * N, H)))

    def forward(self, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        return (F.silu(x @ w1.t()) * (x @ v1.t())) @ w2


class InRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.num_experts, self.features = _Rows(), 4, N

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat, shape = x.flatten(0, 1), (self.num_experts, self.features, -1)
        w1, v1, w2 = (one.view(shape) for one in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        y = torch.zeros_like(flat)
        for e in range(self.num_experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.mlp(flat[token], w1[e], v1[e], w2[e]) * weights[token, slot, None])
        return y.view(x.shape)


class _InRowsReversed(InRows):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, self.num_experts - 1 - chosen, weights)


class RowsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.experts = nn.Linear(H, H), nn.Linear(H, 4), InRows()

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x[None], chosen, weights)[0]


def test_experts_in_the_rows_of_matrices_are_dealt_out() -> None:
    assert not any(find_experts(_InRowsReversed()))
    model, x = RowsModel(), torch.ones(4, H)
    entry = tpk.make_plan(model, 2, example_inputs=x)["experts.mlp"]
    assert isinstance(entry.style, Experts) and entry.style.dealt and entry.style.rows == N, entry.reason
    assert [one.local_shapes[0] for one in entry.parameters] == 3 * [(2 * N, H)]
    assert "4 experts stand in the rows of matrices, and do not divide over 3 ranks" in (
        tpk.make_plan(model, 3, example_inputs=x)["experts.mlp"].reason
    )
    with pytest.raises(ValueError, match=r"'experts\.mlp': its experts stand in the rows of matrices, and whole ones"):
        tpk.make_plan(model, 2, example_inputs=x, experts="features")
    with pytest.raises(ValueError, match="are dealt out: dealt=True"):
        Experts(rows=N)


class _Alone(Mixed):
    """A mixture of one expert, as the defaults of HunYuan's are."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.named_parameters()):
            self.register_parameter(name, nn.Parameter(parameter[:1].detach()))


class AloneModel(Model):
    def __init__(self) -> None:
        super().__init__(_Alone)
        self.router = nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        weights, chosen = self.router(x).sigmoid().topk(1)
        return x + self.experts(x, chosen, weights)


class _AloneOtherwise(_Alone):
    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden_states, chosen, weights.square())


def test_an_expert_alone_is_cut() -> None:
    assert not any(find_experts(_AloneOtherwise()))
    entry = tpk.make_plan(AloneModel(), 2, example_inputs=torch.ones(4, H))["experts"]
    assert isinstance(entry.style, Experts), entry.reason
    assert [one.local_shapes[0] for one in entry.parameters] == [(1, N, H), (1, H, N // 2)]


class _MatrixOfEachHead(nn.Module):
    """Attention with parameters in three dimensions, as XLNet's, which takes more than experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = (nn.Parameter(torch.randn(H, 2, 4)) for _ in range(2))

    def forward(self, x: Tensor, others: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        heads = torch.einsum("th,hnd->tnd", x + others + places, self.query) * mask[:, None, None]
        return torch.einsum("tnd,hnd->th", heads, self.out)


class HeadsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(H, H), _MatrixOfEachHead()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.attention(x, x, x[:, 0], x)
        return y


def test_attention_with_a_matrix_for_each_head_is_not_told_as_experts() -> None:
    plan = tpk.make_plan(HeadsModel(), 2, example_inputs=torch.ones(4, H), experts="features")
    assert plan["attention"].reason == "no way to cut a _MatrixOfEachHead is known"
