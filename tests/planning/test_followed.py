"""What a run on fake tensors follows: counters that code writes to, functions with a backward of their own, results
that code keeps for later, and models within a model that cannot be followed itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.planning.styles import Column, Replicate, Row, Sliced

pytestmark = pytest.mark.cpu

WIDTH = 8
X = torch.zeros(4, WIDTH)
PAIR, ALONE = (Column, False, Row, False), (Column, True, Row, True)


class Gelu(torch.autograd.Function):
    """As Bloom's in transformers 5.24 (models/bloom/modeling_bloom.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        t = torch.tanh(x)
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t))


class Centred(Gelu):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy - dy.mean(-1, keepdim=True)


class Scaled(Gelu):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy / dy.shape[-1]


class Softmax(torch.autograd.Function):
    """As SEW-D's, which takes a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, dim: int) -> Tensor:
        y = x.masked_fill(mask, -30.0).softmax(dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return torch._softmax_backward_data(dy, y, ctx.dim, y.dtype), None, None


class OverHeads(Softmax):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        dx, *nothing = Softmax.backward(ctx, dy)
        return dx - dx.mean(-2, keepdim=True), *nothing


class Shifted(torch.autograd.Function):
    """Each slice by itself, but for the gradient of what is added to all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, dim: int) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy, dy.flatten(0, -2).mean(0), None


def of_heads(function: Any, mask: Tensor) -> Any:
    return lambda h: function.apply(h.unflatten(-1, (-1, 4)), mask, -1).flatten(-2)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        y: Tensor = of_heads(Shifted, self.bias)(h)
        return y


class Mlp(nn.Module):
    """Between its layers runs ``how``; ``before``: a module before them."""

    def __init__(self, how: Any, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.up, self.down, self.how = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.how(self.up(self.before(x))))
        return y


def scores(h: Tensor) -> Tensor:
    return h @ h.transpose(-2, -1)


def unread(h: Tensor) -> Tensor:
    """As far as the run shows: Keras keeps a loss of activities where the run does not look."""
    scores(h).softmax(-1)
    return h.relu()


class Keeping(nn.Module):
    seen: Tensor

    def forward(self, h: Tensor) -> Tensor:
        self.seen = scores(h)
        return h.relu()


def pooled(h: Tensor) -> Tensor:
    return F.max_pool2d(h.view(2, 2, 1, -1).permute(0, 3, 1, 2), (2, 1)).permute(0, 2, 3, 1).flatten(0, 2)


CASES: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "counter": (Mlp(F.relu, nn.BatchNorm1d(WIDTH)), PAIR),
    "two counters": (Mlp(F.relu, nn.Sequential(*[nn.BatchNorm1d(WIDTH)] * 2)), PAIR),
    "elements": (Mlp(Gelu.apply), PAIR),
    "slices": (Mlp(of_heads(Softmax, torch.arange(4) > 2)), PAIR),
    "slices by their neighbours": (Mlp(of_heads(OverHeads, torch.arange(4) > 2)), ALONE),
    "slices and a parameter": (Mlp(Biased()), ALONE),
    "mean of the gradient": (Mlp(Centred.apply), ALONE),
    "size of the gradient": (Mlp(Scaled.apply), ALONE),
    "unread": (Mlp(unread), ALONE),
    "kept": (Mlp(Keeping()), ALONE),
    "pooled": (Mlp(pooled), PAIR),
    "pooled features": (Mlp(lambda h: F.max_pool2d(h[None], (1, 2))[0].repeat(1, 2)), ALONE),
    "read": (Mlp(lambda h: h * scores(h).sum()), ALONE),
    "returned": (Mlp(lambda h: h + 0 * scores(h)[:, :1]), ALONE),
}


@pytest.mark.parametrize("how", CASES)
def test_a_pair_is_proven_where_what_is_between_allows_it(how: str) -> None:
    model, expected = CASES[how]
    plan = tpk.make_plan(model, 2, example_inputs=X)
    up, down = plan["up"].style, plan["down"].style
    assert isinstance(up, Column) and isinstance(down, Row), how
    assert (Column, up.gather_output, Row, down.split_input) == expected, f"{how}: {plan['up'].reason}"


class Windows(nn.Module):
    """Attention whose bias of each head a small MLP makes, as in Swin 2 (transformers' Swinv2SelfAttention), and with a
    number per head that is expanded to the sizes of the scores, as in Flint."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, 4 * WIDTH // heads
        self.query, self.key, self.value, self.out = (nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(4))
        self.bias = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, heads, bias=False))
        self.places = nn.Buffer(torch.zeros(9, 2))
        self.scale = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, self.size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        bias = self.bias(self.places).view(3, 3, self.heads).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1)
        y = (scores * self.scale.view(1, -1, 1, 1).expand(*scores.shape[:3], 1) + bias).softmax(-1) @ v
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def test_what_meets_each_head_is_cut_with_the_heads() -> None:
    plan = tpk.make_plan(Windows(), 2, example_inputs=torch.zeros(2, 3, 4 * WIDTH))
    for name in ("query", "key", "value", "bias.2"):
        assert "4 heads, 2 per rank" in plan[name].reason, f"{name}: {plan[name].reason}"
    assert plan[""].style == Sliced((("scale", 0),)), plan[""].reason
    assert plan["out"].style == Row() and plan["bias.0"].style == Column(gather_output=True)


class Tower(nn.Module):
    """A model of transformers, as far as its inputs are concerned."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.table, self.mlp = nn.Embedding(16, WIDTH), Mlp(F.relu)

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.table(input_ids))
        return y


class Several(nn.Module):
    """``values``: it asks for a number, so that it cannot be followed; else its second tower does not run."""

    def __init__(self, values: bool) -> None:
        super().__init__()
        self.first, self.second, self.values = Tower(), Tower(), values
        self.idle, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, later: bool = False) -> Tensor:
        if self.values and x.sum().item() > 1:
            return x
        y: Tensor = self.first(x)
        return F.linear(self.second(x), self.read.weight) + self.idle(y) if later else y


@pytest.mark.parametrize("values", [True, False])
def test_models_within_a_model_are_followed_by_themselves(values: bool) -> None:
    model = Several(values)
    plan = tpk.make_plan(model, 2)
    for name in ("first", "second"):
        assert plan[f"{name}.mlp.up"].style == Column() and plan[f"{name}.mlp.down"].style == Row(), name
    assert plan["idle"].style == Column(gather_output=True), "a layer by itself"
    assert plan["read"].style == Replicate() and "may use" in plan["read"].reason
    assert bool(plan.fallback) == values
    if values:
        assert "but those of first, second, followed by themselves" in plan.fallback
        with pytest.raises(ValueError, match="needs the data flow of the model"):
            tpk.make_plan(model, 2, sequence_parallel=True)
    else:
        assert "not called by the example" in plan["idle"].reason


class Growing(nn.Module):
    """Makes a longer table of places where it has too few, as MusicGen's and the rotations of many."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Buffer(torch.zeros(2, WIDTH)), Mlp(F.relu)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = nn.Buffer(torch.arange(len(x))[:, None] * torch.ones(WIDTH))
        y: Tensor = self.mlp(x + self.table[: len(x)])
        return y


def test_a_table_that_the_first_call_makes_longer_is_there_in_the_next() -> None:
    model = Growing()
    assert tpk.make_plan(model, 2, example_inputs=X)["mlp.down"].style == Row()
    assert len(model.table) == 2


class Sign(torch.autograd.Function):
    """Gives a gradient to what a comparison has none for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


class Masked(nn.Module):
    """Attention with a mask of floats, which ``how`` makes of an input, as Audio Flamingo 3 counts the frames of it."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) + self.how(mask)[:, None, None]
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(("how", "cut"), [
    (lambda mask: torch.where(torch.arange(3) < mask.sum(-1, keepdim=True).long(), 0.0, -1e4), True),
    (lambda mask: (mask != 0).float().log(), True),
    (lambda mask: (1 - mask) * -1e4, False),  # somebody may want the gradient of the input
    (Sign.apply, False),
], ids=["count", "comparison", "itself", "with a gradient of its own"])  # fmt: skip
def test_a_mask_that_is_compared_of_an_input_is_a_constant(how: Any, cut: bool) -> None:
    plan = tpk.make_plan(Masked(how), 2, example_inputs=(torch.zeros(2, 3, 4 * WIDTH), torch.ones(2, 3)))
    assert plan["out"].style == (Row() if cut else Column(gather_output=True)), plan["out"].reason


class Before(nn.Module):
    """Attention behind a layer of which the mask is made, as GIT makes its mask of the embeddings."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(4 * WIDTH, 4 * WIDTH), Masked(how)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = x + self.attention(x, x[..., 0])
        return y


@pytest.mark.parametrize(("how", "compared"), [
    (lambda first: (first.new_zeros(first.shape, dtype=torch.long) < 1).float().log(), True),
    (lambda first: (first > 0).float().log(), True),
    (lambda first: first, False),
], ids=["shape", "comparison", "itself"])  # fmt: skip
def test_a_mask_of_a_layer_before_does_not_join_that_to_the_heads(how: Any, compared: bool) -> None:
    """One that is compared has no gradient; that of any other is summed where the attention is called with it."""
    plan = tpk.make_plan(Before(how), 2, example_inputs=torch.zeros(2, 3, 4 * WIDTH))
    assert plan["attention.out"].style == Row(), plan["attention.out"].reason
    assert plan.summed_arguments == (() if compared else ("attention.mask",))
    assert plan["first"].style == Column(gather_output=True)


def test_dropout_of_a_comparison_is_seen_between_the_layers_of_a_pair() -> None:
    """A mask that is drawn and compared: no gradient passes it, but ranks draw different numbers for their parts."""
    plan = tpk.make_plan(Mlp(lambda x: x * (torch.rand_like(x) < 0.5)), 2, example_inputs=X)
    assert plan.random == (("up", "down"),)


class Picking(nn.Module):
    """A table of numbers for each head that is read by the parity of what comes in, and by a module that asks for a
    value: its gradient is a share in the one place, and whole in the other."""

    def __init__(self, asked: bool) -> None:
        super().__init__()
        self.up, self.down, self.asks = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), Asking()
        self.table, self.asked = nn.Parameter(torch.ones(2)), asked

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table[(x.sum(-1) > 0).long()].unsqueeze(-1)
        y: Tensor = self.down(self.up(x) * rows)
        return y + self.asks(self.table * 2).sum() if self.asked else y


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3


@pytest.mark.parametrize("asked", [False, True])
def test_a_parameter_that_numbers_pick_has_a_share_of_its_gradient(asked: bool) -> None:
    plan = tpk.make_plan(Picking(asked), 2, example_inputs=X)
    assert plan["down"].style == (Row(split_input=True) if asked else Row()), plan["down"].reason
    assert plan[""].style == Replicate(sequence_parallel=not asked)


class Typed(nn.Module):
    """Asks for a weight's type and dtype alone, as T5's and Kosmos-2.5's."""

    def __init__(self) -> None:
        super().__init__()
        self.wo, self.bare = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor, later: bool = False) -> Tensor:
        if later and isinstance(self.wo.weight, Tensor) and self.bare.bias is None:
            x = self.bare(self.wo(x.to(self.wo.weight.dtype))[..., :WIDTH])
        return x


def test_whoever_asks_what_a_weight_is_reads_none_of_its_numbers() -> None:
    plan = tpk.make_plan(nn.Sequential(Typed(), Mlp(F.relu)), 2, example_inputs=X)
    assert plan["0.wo"].style == plan["0.bare"].style == Column(gather_output=True), plan["0.wo"].reason


class Recurrent(Tower):
    """Keeps what it was called with in a plain tensor, for the next call, as RWKV's blocks do; ``whole``: what the
    layers around take, else what is between them."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Any:  # type: ignore[override]
        x = self.table(input_ids)
        h = self.mlp.up(x)
        state = torch.zeros(len(x), WIDTH if self.whole else 4 * WIDTH)
        if use_cache:
            state[:] = (x if self.whole else h)[:, -1]
        return self.mlp.down(h.relu()), state


def test_a_state_of_plain_tensors_is_whole() -> None:
    assert tpk.make_plan(Recurrent(whole=True), 2)["mlp.down"].style == Row()
    plan = tpk.make_plan(Recurrent(whole=False), 2)
    assert plan["mlp.up"].style == Column(gather_output=True) and isinstance(plan["mlp.down"].style, Row)
    assert plan["mlp.down"].style.split_input, plan["mlp.down"].reason


class Entities(Tower):
    """Words, and entities with a column of their own where there are some, as in LUKE."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.to_entities = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, input_ids: Tensor, entity_ids: Any = None, entity_position_ids: Any = None) -> Tensor:  # type: ignore[override]
        x = self.table(input_ids)
        h = self.mlp.up(x)
        if entity_ids is not None:
            entities = self.table(entity_ids) + self.places(entity_position_ids.clamp(min=0)).mean(-2)
            h = torch.cat([h, self.to_entities(entities)], 1)
        y: Tensor = self.mlp.down(h.relu())
        return y


def test_a_model_of_words_and_entities_is_called_with_both_and_with_words_alone() -> None:
    plan = tpk.make_plan(Entities(), 2)
    assert plan["mlp.up"].style == plan["to_entities"].style == Column() and plan["mlp.down"].style == Row()
    assert plan.example.count("input_ids 3x7") == 2 and plan.example.count("entity_position_ids 3x5x2") == 1
