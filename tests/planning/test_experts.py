"""Which modules are taken for experts: what they compute on samples decides, never what they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.planning.experts import Refused, check_layout, find_experts, layout_of
from tpkernels.planning.styles import Experts
from tpkernels.sharding.same_bits import check_plan

pytestmark = pytest.mark.cpu

E, H, N = 5, 8, 12


class Mixed(nn.Module):
    """Experts of any layout, one by one."""

    def __init__(
        self, gate: str = "halves", transposed: bool = False, bias: bool = False, hidden: int = H, features: int = N
    ) -> None:
        super().__init__()
        self.gate, self.transposed = gate, transposed
        wide = features * (2 if gate in ("halves", "pairs") else 1)
        shapes = {"up": (wide, hidden), "down": (hidden, features)}
        if gate == "separate":
            shapes = {"gate_matrix": (wide, hidden)} | shapes
        for name, (rows, columns) in shapes.items():
            shape = (E, columns, rows) if transposed else (E, rows, columns)
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(E, rows)))

    def product(self, name: str, x: Tensor, expert: int) -> Tensor:
        matrix, bias = getattr(self, name)[expert], getattr(self, f"{name}_bias", None)
        return F.linear(x, matrix.t() if self.transposed else matrix, None if bias is None else bias[expert])

    def middle(self, x: Tensor, expert: int) -> Tensor:
        z = self.product("up", x, expert)
        if self.gate == "":
            return F.relu(z)
        if self.gate == "separate":
            return F.silu(self.product("gate_matrix", x, expert)) * z
        gate, up = (z[..., ::2], z[..., 1::2]) if self.gate == "pairs" else z.chunk(2, -1)
        return F.gelu(gate) * up

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.down.shape[0]):  # type: ignore[index]
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            out = self.product("down", self.middle(hidden_states[token], expert), expert)
            y = y.index_add(0, token, out * weights[token, slot, None])
        return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gate", ["halves", "pairs", "separate", ""])
def test_a_layout_is_found_by_what_is_computed(gate: str, transposed: bool, bias: bool) -> None:
    found = layout_of(Mixed(gate, transposed, bias))
    assert (found.layout.gate, found.layout.transposed, found.layout.call) == (gate, transposed, "routed")
    assert (found.num_experts, found.d_model, found.d_ff) == (E, H, N)
    activation = {"separate": "swiglu", "": "relu"}.get(gate, "geglu")
    assert (found.layout.last, found.layout.activation) == ("down", activation)
    firsts = ("gate_matrix", "up") if gate == "separate" else ("up",)
    assert found.layout.firsts == firsts


@pytest.mark.parametrize("transposed", [False, True])
def test_square_matrices_tell_by_their_numbers_which_way_round_they_are(transposed: bool) -> None:
    assert layout_of(Mixed("", transposed, hidden=N)).layout.transposed == transposed
    assert layout_of(Mixed("pairs", transposed, hidden=2 * N)).layout.transposed == transposed


class _Clamped(Mixed):
    def middle(self, x: Tensor, expert: int) -> Tensor:
        return super().middle(x, expert).clamp(max=1e5)


class _Mixing(Mixed):
    """Features are not independent of each other."""

    def middle(self, x: Tensor, expert: int) -> Tensor:
        return super().middle(x, expert).softmax(-1)


class _Normed(Mixed):
    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return F.normalize(super().forward(hidden_states, chosen, weights), dim=-1)


class _Weighted(Mixed):
    """The weights come before the experts, where they are not linear."""

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scale = weights.sum(1, keepdim=True)
        return super().forward(hidden_states * scale, chosen, torch.ones_like(weights))


class _Dropping(Mixed):
    def middle(self, x: Tensor, expert: int) -> Tensor:
        return F.dropout(super().middle(x, expert), 0.1, self.training)


class _OtherInEvaluation(Mixed):
    def middle(self, x: Tensor, expert: int) -> Tensor:
        return super().middle(x, expert) * (1.0 if self.training else 1.001)


class _NoGradient(Mixed):
    """Values are those of experts, gradients are not."""

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden_states, chosen, weights.detach())


class _Norm(nn.Module):
    """In fp32, as norms of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * (1 + self.weight).float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


class NormBehind(Mixed):
    """A norm takes what each expert gives, before it is weighted, as in Muse Spark."""

    def __init__(self, gate: str = "halves", bias: bool = False) -> None:
        super().__init__(gate, bias=bias)
        self.norm: nn.Module = _Norm()

    def product(self, name: str, x: Tensor, expert: int) -> Tensor:
        y = super().product(name, x, expert)
        return self.norm(y) if name == "down" else y  # type: ignore[no-any-return]


class _NormOfTheSum(NormBehind):
    def product(self, name: str, x: Tensor, expert: int) -> Tensor:
        return Mixed.product(self, name, x, expert)

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.norm(super().forward(hidden_states, chosen, weights))  # type: ignore[no-any-return]


class _NormOverRows(NormBehind):
    """What an expert gives for a token depends on its other tokens."""

    def product(self, name: str, x: Tensor, expert: int) -> Tensor:
        y = super().product(name, x, expert)
        return y - y.mean(0) if name == "down" else y


class _CallsItself(Mixed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)


CHANGED = (
    _Clamped, _Mixing, _Normed, _Weighted, _Dropping, _OtherInEvaluation, _NoGradient, _CallsItself, _NormOfTheSum,
    _NormOverRows,
)  # fmt: skip


@pytest.mark.parametrize("kind", CHANGED)
def test_a_subclass_that_computes_something_else_is_refused(kind: type[Mixed]) -> None:
    with pytest.raises(Refused) as raised:
        layout_of(kind())
    assert str(raised.value)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["pairs", ""])
def test_a_norm_behind_each_expert_is_kept(gate: str, bias: bool) -> None:
    module = NormBehind(gate, bias)
    assert layout_of(module).layout.behind == "norm"
    module.norm = nn.LayerNorm(H)
    assert layout_of(module).layout.behind == "norm"
    module.other = nn.Linear(H, H)
    with pytest.raises(Refused, match="parameters in several modules of its own"):
        layout_of(module)


class Model(nn.Module):
    def __init__(self, kind: type[Mixed] = Mixed) -> None:
        super().__init__()
        self.up = nn.Linear(H, H)
        self.router = nn.Linear(H, E)
        self.experts = kind()

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


def test_what_stays_whole_says_why() -> None:
    model = Model(_Mixing)
    plan = tpk.make_plan(model, 2, example_inputs=torch.ones(4, H))
    assert plan["experts"].is_replicated
    assert "stay whole: its forward computes something else" in plan["experts"].reason
    with pytest.raises(ValueError, match="experts=\"features\" cannot cut 'experts': its forward computes"):
        tpk.make_plan(model, 2, example_inputs=torch.ones(4, H), experts="features")


def test_a_plan_cuts_gate_and_up_alike_and_says_what_is_sent() -> None:
    plan = tpk.make_plan(Model(), 5, example_inputs=torch.ones(4, H), experts="features")
    entry = plan["experts"]
    assert isinstance(entry.style, Experts)
    up, down = entry.parameters
    assert [shape[1] for shape in up.local_shapes] == [6, 6, 6, 6, 0]  # 12 as torch.chunk cuts, gate and up
    assert [shape[2] for shape in down.local_shapes] == [3, 3, 3, 3, 0]
    tokens, slots = 4 * H * 4, 4 * 2 * 4
    assert entry.wire_bytes == 2 * (2 * tokens + slots) * 4 // 5
    assert (entry.forward, entry.backward) == ("all-reduce of y", "all-reduce of dx, dr")
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    behind = tpk.make_plan(Model(NormBehind), 2, example_inputs=torch.ones(4, H), experts="features")
    assert behind["experts"].wire_bytes == 2 * (2 * tokens + tokens) // 2  # a row for each of a token's two experts
    assert behind["experts"].backward == "all-reduce of dx" and behind["experts.norm"].is_replicated
    assert tpk.ShardingPlan.from_json(behind.to_json()) == behind


class _Reading(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts.down.mean()  # type: ignore[operator, union-attr]


class _Sequences(Model):
    """Calls the experts with three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.up(torch.stack([self.experts(x[None, 0], chosen[None, 0, 0], weights[None, 0, 0]) for _ in x]))


@pytest.mark.parametrize(
    ("model", "reason"),
    [(_Reading(), "uses without calling"), (_Sequences(), "other things than"), (Model(), "fewer features")],
)
def test_experts_that_others_read_or_that_are_called_otherwise_stay_whole(model: nn.Module, reason: str) -> None:
    ranks = 2 * N if reason == "fewer features" else 2
    overrides = {"router": "replicate", "up": "replicate"} if ranks > 2 else {}
    if isinstance(model, _Sequences):
        model.experts = _Single()  # type: ignore[assignment]
    plan = tpk.make_plan(model, ranks, example_inputs=torch.ones(4, H), overrides=overrides)
    assert plan["experts"].is_replicated and reason in plan["experts"].reason, plan["experts"].reason


class _Single(Mixed):
    """Also takes one expert for each token."""

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if chosen.dim() == 1:
            chosen, weights = chosen[:, None], weights[:, None]
        return super().forward(hidden_states, chosen, weights)


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


def test_plans_of_experts_pass_the_checks_of_same_bits() -> None:
    model, x = Model(), torch.ones(4, H)
    plan = tpk.make_plan(model, 2, example_inputs=x, same_bits=4)
    assert isinstance(plan["experts"].style, Experts)
    check_plan(plan, model, 4, x, "auto")
    behind = tpk.make_plan(Model(NormBehind), 2, example_inputs=x, same_bits=4)
    assert "same_bits is not proven for experts of this kind" in behind["experts"].reason


def test_other_ways_to_cut_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r'experts must be "auto", "features" or "experts", got .rows.'):
        tpk.make_plan(Model(), 2, example_inputs=torch.ones(4, H), experts="rows")


def test_hooks_and_buffers_are_not_lost() -> None:
    hooked, buffered = Mixed(), Mixed()
    hooked.register_forward_hook(lambda *_: None)
    buffered.register_buffer("seen", torch.zeros(E))
    found, refused = find_experts(nn.ModuleList([hooked, buffered, Mixed()]))
    assert list(found) == ["2"] and "hooks" in refused["0"] and "buffers" in refused["1"]


def test_a_plan_for_another_class_is_refused_where_it_is_applied() -> None:
    known = layout_of(Mixed()).layout
    check_layout(Mixed(hidden=3, features=5), known)
    for other in (Mixed("pairs"), Mixed(transposed=True), _Clamped(), Mixed("")):
        with pytest.raises(Refused):
            check_layout(other, known)


class _OwnGate(Mixed):
    """In fp32, where the op's gate gives the same."""

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return (F.gelu(gate.float()) * up.float()).to(z.dtype)

    def middle(self, x: Tensor, expert: int) -> Tensor:
        return self._apply_gate(self.product("up", x, expert))


def test_a_gate_that_the_class_defines_is_kept() -> None:
    assert layout_of(_OwnGate()).layout.activation == "_apply_gate()"


@pytest.mark.parametrize("around", [torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)])
def test_what_the_caller_has_switched_on_changes_nothing(around: Any) -> None:
    module, state = Mixed(), torch.get_rng_state()
    with around:
        assert layout_of(module).layout.gate == "halves"
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_that_are_not_made_yet_are_no_experts() -> None:
    found, refused = find_experts(nn.Sequential(nn.LazyLinear(3), nn.LazyConv1d(3, 3), Mixed()))
    assert list(found) == ["2"] and not refused


class _Tokens(nn.Module):
    """The class token and the positions of a vision transformer of timm: two parameters of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 5, 8))


def test_tokens_and_normalised_convolutions_are_not_called_experts() -> None:
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    found, refused = find_experts(nn.Sequential(_Tokens(), convolution, Mixed()))
    assert list(found) == ["2"] and not refused
