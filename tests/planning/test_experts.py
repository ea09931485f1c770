"""Which modules are taken for experts: what they compute on samples decides, never what they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.planning.modules.experts import Refused, check_layout, find_experts, layout_of
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


class OwnGate(Mixed):
    """In fp32, where the op's gate gives the same."""

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        return (F.gelu(gate.float()) * up.float()).to(z.dtype)

    def middle(self, x: Tensor, expert: int) -> Tensor:
        return self._apply_gate(self.product("up", x, expert))


class Images(Model):
    """Has experts of their own for images, as ERNIE 4.5 VL does."""

    def __init__(self, kind: type[Mixed] = Mixed, of_images: type[Mixed] = Mixed) -> None:
        super().__init__(kind)
        self.of_images = of_images()

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if images is not None:
            weights, chosen = self.router(images).softmax(-1).topk(2)
            y = torch.cat([y, self.of_images(images, chosen, weights)])
        return y


class _ImagesReading(Images):
    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        return super().forward(x, images) if images is None else x * self.of_images.down.mean()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("model", "along", "why"),
    [
        (Images(), False, ""),
        (Images(), True, "stay whole: not called by the example"),  # which might be given parts of a sequence
        (Images(OwnGate), False, "stay whole: not called by the example"),  # nor is another one of its class
        (_ImagesReading(), False, "the code of _ImagesReading may read their parameters"),
    ],
    ids=["cut", "sequence", "another class", "read"],
)
def test_experts_that_no_example_calls_are_cut_as_those_of_their_class_are(
    model: nn.Module, along: bool, why: str
) -> None:
    plan = tpk.make_plan(model, 2, example_inputs=torch.ones(4, H), sequence_parallel=along)
    assert isinstance(plan["experts"].style, Experts)
    assert isinstance(plan["of_images"].style, Experts) == (why == "")
    assert (why or "compared on samples; not called by the example") in plan["of_images"].reason


def test_plans_of_experts_pass_the_checks_of_same_bits() -> None:
    model, x = Model(), torch.ones(4, H)
    plan = tpk.make_plan(model, 2, example_inputs=x, same_bits=4)
    assert isinstance(plan["experts"].style, Experts)
    check_plan(plan, model, 4, x, "auto")
    for kind in (NormBehind, OwnGate):
        for way in ("features", "experts"):
            behind = tpk.make_plan(Model(kind), 2, example_inputs=x, experts=way, same_bits=4)
            check_plan(behind, Model(kind), 4, x, way)
    eighths = tpk.make_plan(model, 2, example_inputs=x, same_bits=8)
    assert "12 features do not divide into the 8 blocks of same_bits" in eighths["experts"].reason


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


def test_a_gate_that_the_class_defines_is_kept() -> None:
    assert layout_of(OwnGate()).layout.activation == "_apply_gate()"


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
