"""Ops without parameters: functions of what may be cut, and of the whole that stands beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.vocabulary import FEATURES, HEADS, function

__all__ = ["StraightThrough", "fitted"]


def fitted(whole: Tensor, like: Tensor) -> Tensor:
    """The whole with as many features as ``like``: its first ones, over and over where they are too few."""
    size = like.shape[-1]
    times = -(-size // whole.shape[-1])
    return whole.repeat(1, 1, times)[..., :size]


def _sampled(image: Tensor, places: Tensor) -> Tensor:
    return F.grid_sample(image, places, align_corners=False)


class StraightThrough(torch.autograd.Function):
    """Rounds, and lets the gradient pass, tripled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * dy


class FeatureMixing(torch.autograd.Function):
    """Its own gradient sums over features, though its value does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy + dy.mean(-1, keepdim=True)


def _hooked(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y


def _hooked_over_features(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient - gradient.mean(-1, keepdim=True))
    return y


def _copied(x: Tensor, change: Any) -> Tensor:
    y = x.clone()
    change(y)
    return y


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())


def _unpaired(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


def _gram(rows: Tensor) -> Tensor:
    return (rows @ rows.t()).softmax(-1)


def _gram_plus(rows: Tensor) -> Tensor:
    return torch.addmm(torch.ones(1, dtype=rows.dtype), rows, rows.t()).softmax(-1)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1).mul(2).view(x.shape)


def _written_to_zeros(x: Tensor) -> Tensor:
    """One feature, by way of a tensor that is made of no other one."""
    found = torch.zeros(*x.shape[:2], 1, dtype=x.dtype)
    found[..., 0] = x[..., 0]
    return found


def _first_quarter(x: Tensor) -> Tensor:
    quarter = x.shape[-1] // 4
    first, _ = x.split([quarter, x.shape[-1] - quarter], -1)
    return first.repeat_interleave(4, -1) if x.shape[-1] % 4 == 0 else x


def _scores_plus(x: Tensor, bias: float) -> Tensor:
    return torch.baddbmm(torch.full((1,), bias, dtype=x.dtype), x, x.transpose(1, 2)).softmax(-1)


def _convolved(x: Tensor) -> Tensor:
    """Each channel along the sequence."""
    weight = torch.ones(x.shape[-1], 1, 2, dtype=x.dtype)
    return F.conv1d(F.pad(x.transpose(1, 2), (1, 0)), weight, groups=x.shape[-1]).transpose(1, 2)


def _feature_put(turned: Tensor, *, in_place: bool = False) -> Tensor:
    """Zeros as the first of the features, which come first."""
    first, zero = (torch.zeros(1, dtype=torch.long),), turned.new_zeros(())
    return turned.index_put_(first, zero) if in_place else turned.index_put(first, zero)


def _convolved_over_features(x: Tensor) -> Tensor:
    return F.conv1d(x, torch.ones(x.shape[1], 1, 3, dtype=x.dtype), padding=1, groups=x.shape[1])


def _solved(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(0.1 * a, b, upper=False, unitriangular=True)


SAFE: dict[str, Any] = {
    "convolved_channels": lambda x, w: _convolved(x),
    "relu": lambda x, w: x.relu(),
    "gelu": lambda x, w: F.gelu(x),
    "tanh": lambda x, w: x.tanh(),
    "silu": lambda x, w: F.silu(x),
    "log_sigmoid": lambda x, w: F.logsigmoid(x),
    "square": lambda x, w: x * x.sigmoid() + 0.1 * x.pow(2),
    "clamp": lambda x, w: x.clamp(-1.0, 1.5),
    "dropout_of_nothing": lambda x, w: F.dropout(x, 0.0, True),
    "softmax_over_length": lambda x, w: x.softmax(1),
    "cumsum_over_length": lambda x, w: x.cumsum(1) * 0.3,
    "flip_length": lambda x, w: x.flip(1),
    "roll_length": lambda x, w: x.roll(1, 1),
    "sort_length": lambda x, w: x.sort(1).values,
    "centred_over_length": lambda x, w: x - x.mean(1, keepdim=True),
    "normed_over_length": lambda x, w: F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2),
    "standardised_over_rows": lambda x, w: (x - x.mean((0, 1))) / (x.var((0, 1)) + 1).sqrt(),
    "through_rows": lambda x, w: _rows(x),
    "transposed_and_back": lambda x, w: x.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted_and_back": lambda x, w: x.permute(2, 0, 1).sin().permute(1, 2, 0),
    "expanded": lambda x, w: x.unsqueeze(0).expand(2, -1, -1, -1).mean(0),
    "stacked": lambda x, w: torch.stack([x, x.tanh()], 1).sum(1),
    "twice_beside": lambda x, w: torch.cat([x, x.sin()], -1)[..., : x.shape[-1]],
    "along_length": lambda x, w: torch.cat([x[:, 1:], x[:, :1]], 1),
    "chunks_of_length": lambda x, w: torch.cat([part * (i + 1) for i, part in enumerate(x.split(2, 1))], 1),
    "shifted_by_padding": lambda x, w: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "where_positive": lambda x, w: torch.where(x > 0, x, 0.1 * x),
    "where_filled": lambda x, w: x.masked_fill(x < -1, -1.0),
    "times_detached": lambda x, w: x * x.detach().abs(),
    "part_of_it_detached": lambda x, w: x + x.detach().tanh(),
    "straight_through": lambda x, w: StraightThrough.apply(x),
    "hook_on_a_tensor": lambda x, w: _hooked(x),
    "relu_in_place": lambda x, w: F.relu(x * 1, inplace=True),
    "times_in_place": lambda x, w: _copied(x, lambda y: y.mul_(1.5).add_(0.1)),
    "first_row_in_place": lambda x, w: _copied(x, lambda y: y[:, 0].mul_(2)),
    "rows_in_place": lambda x, w: _copied(x, lambda y: y[:, :2].add_(1)),
    "a_row_set": lambda x, w: _copied(x, lambda y: y.__setitem__((slice(None), 0), 0.5)),
    "view_in_place": lambda x, w: _copied(x, lambda y: y.view(-1, y.shape[-1]).mul_(0.5)),
    "through_integers": lambda x, w: x * (x * 2).long().clamp(-3, 3).to(x.dtype),
    "through_bool": lambda x, w: x * (x > 0),
    "through_fp32": lambda x, w: x + x.detach().float().round().to(x.dtype),
    "gathered_along_length": lambda x, w: x.gather(1, x.argsort(1)),
    # Equal tokens have equal rows but for rounding: all of them are the largest.
    "largest_of_length": lambda x, w: x * (x > x.amax(1, keepdim=True) - 1e-6),
    "repeated_length": lambda x, w: x.repeat_interleave(2, 1)[:, ::2],
    "unfolded_length": lambda x, w: x.unfold(1, 2, 1).sum(-1)[:, :1] + x,
    "times_a_new_one": lambda x, w: x * x.new_full((1,), 0.5) + torch.zeros_like(x),
    "plus_new_zeros": lambda x, w: x + torch.zeros(x.shape, dtype=x.dtype),
    "row_of_the_whole": lambda x, w: x * (w.detach()[..., :1] > 0),
    "scaled_by_length": lambda x, w: x / x.shape[1] ** 0.5,
    "product_with_rows": lambda x, w: torch.softmax(w.detach() @ w.detach().transpose(1, 2), -1) @ x,
    "picked_along_length": lambda x, w: x[:, torch.arange(x.shape[1]).flip(0)],
    "outputs_of_max": lambda x, w: x.max(1, keepdim=True).values + x,
    "expanded_in_front": lambda x, w: x.expand(2, *x.shape).mean(0),
    "turned_rows": lambda x, w: x.flatten(0, 1).t().sin().t().view(x.shape),
    "squeezed": lambda x, w: x.unsqueeze(1).cos().squeeze(1),
    "std_of_length": lambda x, w: x / (1 + x.std(1, keepdim=True)),
    "var_mean_of_length": lambda x, w: x - torch.var_mean(x, 1, keepdim=True)[1],
    "smallest_of_length": lambda x, w: x - x.amin(1, keepdim=True),
    "ones_like": lambda x, w: x * torch.ones_like(x) + torch.full_like(x, 0.5),
    "zeroed_in_place": lambda x, w: _copied(x, lambda y: y[:, :1].zero_()) + _copied(x, lambda y: y[:, 1:].fill_(0.5)),
    "copied_into_empty": lambda x, w: torch.empty_like(x).copy_(x),
    "repeated_rows": lambda x, w: x.repeat(1, 2, 1)[:, : x.shape[1]],
    "times_what_was_empty": lambda x, w: x * torch.empty_like(x).fill_(0.5),
    "nothing_of_dropout": lambda x, w: x + 0 * F.dropout(x, 0.5, True),
    "nothing_of_native_dropout": lambda x, w: x + 0 * torch.native_dropout(x, 0.5, True)[0],
    "nothing_of_noise": lambda x, w: x + 0 * torch.rand_like(x),
    "nothing_of_draws": lambda x, w: x + 0 * torch.bernoulli(x.detach().sigmoid()),
    "repeated_in_front": lambda x, w: x.repeat(2, 1, 1, 1).mean(0),
    "tiled_features_without_the_rest": lambda x, w: x.repeat(1, 1, 2).tanh()[..., : x.shape[-1]],
    "movedim": lambda x, w: x.movedim(2, 0).exp().log1p().movedim(0, 2),
}

TRAPS: dict[str, Any] = {
    "convolved_over_features": lambda x, w: _convolved_over_features(x),
    "largest_of_neighbours": lambda x, w: F.max_pool2d(x, (1, 3), stride=1, padding=(0, 1)),
    "mean_of_neighbours": lambda x, w: F.avg_pool2d(x, (1, 3), stride=1, padding=(0, 1)),
    "solved_over_rows": lambda x, w: _solved(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype), x),
    "softmax_over_features": lambda x, w: x.softmax(-1),
    "safe_softmax_over_features": lambda x, w: torch._safe_softmax(x, -1),
    "log_softmax_over_features": lambda x, w: F.log_softmax(x, -1),
    "normed_over_features": lambda x, w: F.layer_norm(x, (x.shape[-1],)),
    "rms_by_hand": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1),
    "centred_over_features": lambda x, w: x - x.mean(-1, keepdim=True),
    "sum_of_features": lambda x, w: x + x.sum(-1, keepdim=True) * 0.1,
    "sum_of_everything": lambda x, w: x + x.mean(),
    "largest_feature": lambda x, w: x - x.amax(-1, keepdim=True),
    "min_of_features": lambda x, w: x * x.min(-1, keepdim=True).values.tanh(),
    "picked_feature": lambda x, w: x * x[..., torch.tensor([0])].tanh(),
    "gathered_feature": lambda x, w: x * x.gather(-1, torch.zeros(*x.shape[:-1], 1, dtype=torch.long)).tanh(),
    "max_of_features": lambda x, w: x * x.max(-1, keepdim=True).values.tanh(),
    "only_the_largest": lambda x, w: x * F.one_hot(x.argmax(-1), x.shape[-1]),
    "topk_threshold": lambda x, w: x * (x >= x.topk(2, -1).values[..., -1:]),
    "l2_normed": lambda x, w: F.normalize(x, dim=-1),
    "vector_norm": lambda x, w: x / (1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "all_positive": lambda x, w: x * (1 + (x > -0.5).all(-1, keepdim=True)),
    "logsumexp": lambda x, w: x - x.logsumexp(-1, keepdim=True),
    "cumsum_over_features": lambda x, w: x.cumsum(-1) * 0.3,
    "cummax_over_features": lambda x, w: x.cummax(-1).values,
    "flip_features": lambda x, w: x.flip(-1),
    "roll_features": lambda x, w: x.roll(1, -1),
    "sort_features": lambda x, w: x.sort(-1).values,
    "ranks_of_features": lambda x, w: x * x.argsort(-1).to(x.dtype),
    "variance_of_features": lambda x, w: x / (1 + x.var(-1, keepdim=True)),
    "std_of_features": lambda x, w: x / (1 + x.std(-1, keepdim=True)),
    "var_mean_of_features": lambda x, w: x - torch.var_mean(x, -1, keepdim=True)[1],
    "mean_of_var_mean": lambda x, w: x - torch.var_mean(x, -1)[1].unsqueeze(-1),
    "smallest_feature": lambda x, w: x - x.amin(-1, keepdim=True),
    "prod_of_features": lambda x, w: x * x.tanh().prod(-1, keepdim=True),
    "numbers_of_features": lambda x, w: x * torch.arange(x.shape[-1], dtype=x.dtype).div(8).add(1),
    "scaled_by_features": lambda x, w: x / x.shape[-1] ** 0.5,
    "scaled_by_numel": lambda x, w: x * (x.numel() / 100),
    "divided_by_a_tensor": lambda x, w: x / torch.tensor(float(x.shape[-1]), dtype=x.dtype),
    "minus_linspace": lambda x, w: x - torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
    "lower_triangle": lambda x, w: x.tril(2),
    "plus_whole": lambda x, w: x + fitted(w, x),
    "times_whole": lambda x, w: x * fitted(w, x).sigmoid(),
    "whole_in_place": lambda x, w: _copied(x, lambda y: y.add_(w[..., :1])),
    "times_a_feature_of_the_whole": lambda x, w: x * w[..., :1],
    "times_the_whole_by_way_of_zeros": lambda x, w: x * _written_to_zeros(w),
    "plus_the_mean_of_the_whole": lambda x, w: x + w.mean(-1, keepdim=True),
    "largest_of_two": lambda x, w: torch.maximum(x, w[..., -1:]),
    "where_whole": lambda x, w: torch.where(x > 0, x, w[..., :1]),
    "lerp_to_whole": lambda x, w: torch.lerp(x, w[..., :1].expand_as(x), 0.3),
    "addcmul_of_whole": lambda x, w: torch.addcmul(x, x, w[..., :1], value=0.5),
    "whole_through_integers": lambda x, w: x * (w[..., :1] * 3).long().to(x.dtype),
    "beside_whole": lambda x, w: torch.cat([x, w], -1)[..., : x.shape[-1]],
    "behind_whole": lambda x, w: torch.cat([w, x], -1)[..., -x.shape[-1] :],
    "rows_beside_whole": lambda x, w: torch.cat([fitted(w, x), x], 1)[:, w.shape[1] :] + x,
    "attends_to_whole": lambda x, w: torch.softmax(w @ w.transpose(1, 2), -1) @ x,
    "attends_by_part": lambda x, w: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    "attends_by_part_and_bias": lambda x, w: _scores_plus(x, 0.5) @ x,
    "gram_of_features": lambda x, w: x @ torch.tanh(x.transpose(1, 2) @ x),
    "gram_of_rows": lambda x, w: (_gram(x.flatten(0, 1)) @ x.flatten(0, 1)).view(x.shape),
    "gram_of_rows_plus_one": lambda x, w: (_gram_plus(x.flatten(0, 1)) @ x.flatten(0, 1)).view(x.shape),
    "chunks_beside_themselves": lambda x, w: torch.cat([x.chunk(2, -1)[0].sin(), x], -1)[..., : x.shape[-1]],
    "outer_with_whole": lambda x, w: (x.unsqueeze(-1) * w.unsqueeze(-2)).mean(-1),
    "einsum_with_whole": lambda x, w: torch.einsum("bsf,bsg->bsf", x, w),
    "distances": lambda x, w: x + torch.cdist(x, x).mean(-1, keepdim=True),
    "one_feature": lambda x, w: x + x[..., :1],
    "last_feature": lambda x, w: x * x[..., -1:].tanh(),
    "selected_feature": lambda x, w: x + x.select(-1, 0).unsqueeze(-1),
    "one_feature_in_place": lambda x, w: _copied(x, lambda y: y[..., 0].mul_(2)),
    "first_features_set": lambda x, w: _copied(x, lambda y: y[..., :2].copy_(w[..., :2])),
    "scattered_features": lambda x, w: x.scatter_add(-1, x.argsort(-1), x.tanh()),
    "index_put_of_features": lambda x, w: x.index_put((torch.arange(x.shape[0]),), x.new_ones(()), accumulate=True),
    "one_feature_put": lambda x, w: _feature_put(x.transpose(0, 2)).transpose(0, 2),
    "one_feature_put_in_place": lambda x, w: _copied(x, lambda y: _feature_put(y.transpose(0, 2), in_place=True)),
    "first_feature_by_its_place": lambda x, w: x.contiguous().as_strided(x.shape, (*x.contiguous().stride()[:2], 0)),
    "counts_of_the_largest": lambda x, w: x * (1 + torch.bincount(x.argmax(-1).flatten(), minlength=9)[:1]),
    "unfolded_features": lambda x, w: x + x.unfold(-1, 2, 64).sum(-1)[..., :1],  # one window, of rank 0
    "sampled_features": lambda x, w: _sampled(x[:, None], torch.stack([x.sin(), x.cos()], -1))[:, 0],
    "sampled_in_space": lambda x, w: _sampled(x[:, None, None], torch.stack([x.sin()] * 3, -1)[:, None])[:, 0, 0],
    "padded_features": lambda x, w: F.pad(x, (1, 0))[..., :-1] + x,
    "shifted_features": lambda x, w: F.pad(x, (1, -1)),
    "repeated_features": lambda x, w: x.repeat_interleave(2, -1)[..., : x.shape[-1]],
    "first_quarter_of_features": lambda x, w: x + _first_quarter(x),
    "tiled_features": lambda x, w: x.repeat(1, 1, 2)[..., 1 : x.shape[-1] + 1],
    "moved_between_rows": lambda x, w: x.reshape(x.shape[0], -1).roll(1, -1).view(x.shape),
    "viewed_as_other_rows": lambda x, w: x.view(x.shape[0], x.shape[2], x.shape[1]).softmax(-1).view(x.shape),
    "fft_of_features": lambda x, w: torch.fft.fft(x, dim=-1).real,
    "fft_of_length": lambda x, w: torch.fft.fft(x, dim=1).real,
    "gradient_over_features": lambda x, w: FeatureMixing.apply(x),
    "hook_over_features": lambda x, w: _hooked_over_features(x),
    "size_in_a_slice": lambda x, w: x + x[..., x.shape[-1] // 2 :].sum(-1, keepdim=True),
    "quantile": lambda x, w: x - x.detach().quantile(0.5, -1, keepdim=True),
    "digits": lambda x, w: x * torch.searchsorted(x.detach().sort(-1).values, w.detach()[..., :1].contiguous()),
}

EVEN: dict[str, Any] = {
    "rotated_halves": lambda x, w: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1),
    "chunks_swapped": lambda x, w: torch.cat(x.chunk(2, -1)[::-1], -1),
    "glu": lambda x, w: F.glu(x, -1).repeat(1, 1, 2),
    "chunks_gate": lambda x, w: torch.cat([x.chunk(2, -1)[0].sigmoid() * x.chunk(2, -1)[1]] * 2, -1),
    "every_other": lambda x, w: torch.cat([x[..., ::2], x[..., 1::2]], -1),
    "interleaved": lambda x, w: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2),
    "complex_magnitude": lambda x, w: _unpaired(_pairs(x) * _pairs(x).abs()),
    "complex_conjugate": lambda x, w: _unpaired(_pairs(x).conj() * (0.6 + 0.8j)),
    "complex_with_whole": lambda x, w: _unpaired(_pairs(x) * _pairs(w[..., :2])),
    "complex_with_all_of_the_whole": lambda x, w: _unpaired(_pairs(x) + _pairs(fitted(w, x))),
    "real_from_whole": lambda x, w: x * torch.polar(w[..., :1].sigmoid(), w[..., 1:2]).real,
    "complex_sum": lambda x, w: _unpaired(_pairs(x) + _pairs(x).mean(-1, keepdim=True)),
}

for name, run in SAFE.items():
    function(FEATURES, name, run)
for name, run in TRAPS.items():
    function(FEATURES, name, run, trap=True)
for name, run in EVEN.items():
    function(FEATURES, name, run, trap=True, needs="even")


def _seq(at: int) -> int:
    return 3 - at


def _halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _angles(x: Tensor, at: int, size: int) -> Tensor:
    """Of positions and frequencies, to be broadcast over heads."""
    positions = torch.arange(x.shape[_seq(at)], dtype=x.dtype)
    angles = torch.outer(positions, 1.0 / 10.0 ** torch.linspace(0, 1, size, dtype=x.dtype))
    return angles.unsqueeze(at - 1)


def _rotary(x: Tensor, at: int) -> Tensor:
    angles = _angles(x, at, x.shape[-1] // 2).repeat(1, 1, 2)
    return x * angles.cos() + _halves(x) * angles.sin()


def _complex_rotary(x: Tensor, at: int) -> Tensor:
    angles = _angles(x, at, x.shape[-1] // 2)
    return _unpaired(_pairs(x) * torch.polar(torch.ones_like(angles), angles))


def _by_whole(x: Tensor, whole: Tensor, at: int) -> Tensor:
    """Rotary whose angles an activation gives."""
    angles = whole[..., :1].tanh().unsqueeze(at)
    return _unpaired(_pairs(x) * torch.polar(torch.ones_like(angles), angles))


def _selected(x: Tensor, at: int, index: int) -> Tensor:
    return x.select(at, index).unsqueeze(at)


SAFE_HEADS: dict[str, Any] = {
    "solved_in_a_head": lambda x, w, at: _solved(x @ x.transpose(-1, -2), x) if at == 1 else x,
    "relu": lambda x, w, at: x.relu(),
    "scaled_by_head_dim": lambda x, w, at: x * x.shape[-1] ** -0.5,
    "softmax_of_a_head": lambda x, w, at: x.softmax(-1),
    "normed_head": lambda x, w, at: F.rms_norm(x, (x.shape[-1],)),
    "layer_normed_head": lambda x, w, at: F.layer_norm(x, (x.shape[-1],)),
    "l2_normed_head": lambda x, w, at: F.normalize(x, dim=-1),
    "centred_head": lambda x, w, at: x - x.mean(-1, keepdim=True),
    "cumsum_in_a_head": lambda x, w, at: x.cumsum(-1),
    "flipped_head": lambda x, w, at: x.flip(-1),
    "rolled_head": lambda x, w, at: x.roll(1, -1),
    "sorted_head": lambda x, w, at: x.sort(-1).values,
    "cumsum_over_length": lambda x, w, at: x.cumsum(_seq(at)) * 0.3,
    "largest_of_a_head": lambda x, w, at: x * (x == x.amax(-1, keepdim=True)),
    "argmax_of_a_head": lambda x, w, at: x * F.one_hot(x.argmax(-1), x.shape[-1]),
    "first_of_a_head": lambda x, w, at: x + x[..., :1],
    "heads_away_and_back": lambda x, w, at: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part_of_a_head": lambda x, w, at: torch.cat([x[..., :1].sin(), x[..., 1:]], -1),
    "topk_of_a_head": lambda x, w, at: x * (x >= x.topk(1, -1).values),
    "head_in_place": lambda x, w, at: _copied(x, lambda y: y[..., 0].mul_(2)),
    "length_over_a_head": lambda x, w, at: (x.transpose(-1, _seq(at)).softmax(-1)).transpose(-1, _seq(at)),
    "expanded_heads": lambda x, w, at: x.unsqueeze(0).expand(2, -1, -1, -1, -1).sum(0),
    "scores_of_itself": lambda x, w, at: ((x @ x.transpose(-1, -2)).softmax(-1) @ x) if at == 1 else x,
}
EVEN_HEADS: dict[str, Any] = {
    "rotary": lambda x, w, at: _rotary(x, at),
    "rotary_complex": lambda x, w, at: _complex_rotary(x, at),
    "rotated_halves_of_a_head": lambda x, w, at: _halves(x),
    "interleaved_head": lambda x, w, at: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2),
    "fft_of_a_head": lambda x, w, at: _unpaired(torch.fft.fft(_pairs(x), dim=-1)),
    "magnitude_of_pairs": lambda x, w, at: _unpaired(_pairs(x) * _pairs(x).abs()),
}
TRAP_HEADS: dict[str, Any] = {
    "softmax_over_heads": lambda x, w, at: x.softmax(at),
    "normed_over_heads": lambda x, w, at: F.layer_norm(x.transpose(at, -1), (x.shape[at],)).transpose(at, -1),
    "mean_over_heads": lambda x, w, at: x - x.mean(at, keepdim=True),
    "sum_over_heads": lambda x, w, at: x + x.sum(at, keepdim=True) * 0.3,
    "normed_over_all": lambda x, w, at: F.layer_norm(x, x.shape[1:]),
    "cumsum_over_heads": lambda x, w, at: x.cumsum(at),
    "sorted_heads": lambda x, w, at: x.sort(at).values,
    "flipped_heads": lambda x, w, at: x.flip(at),
    "rolled_heads": lambda x, w, at: x.roll(1, at),
    "largest_head": lambda x, w, at: x * (x == x.amax(at, keepdim=True)),
    "argmax_over_heads": lambda x, w, at: x * F.one_hot(x.argmax(at), x.shape[at]).movedim(-1, at),
    "first_head": lambda x, w, at: x + _selected(x, at, 0),
    "last_head": lambda x, w, at: x * _selected(x, at, -1).tanh(),
    "topk_heads": lambda x, w, at: x * (x >= x.topk(1, at).values),
    "heads_mixed": lambda x, w, at: x + x.unbind(at)[0].unsqueeze(at),
    "scaled_by_heads": lambda x, w, at: x / x.shape[at],
    "heads_by_number": lambda x, w, at: (
        x * torch.arange(1, x.shape[at] + 1, dtype=x.dtype).view(*([1] * at), -1, *([1] * (3 - at)))
    ),
    "heads_attend": lambda x, w, at: ((x @ x.transpose(-1, -2)).softmax(-1) @ x) if at == 2 else x.flip(1),
    "heads_attend_by_kernel": lambda x, w, at: F.scaled_dot_product_attention(x, x, x),
    "heads_plus_whole": lambda x, w, at: x + w[..., :1].unsqueeze(at),
    "heads_times_whole": lambda x, w, at: x * fitted(w, x).unsqueeze(at).sigmoid(),
    "heads_where_whole": lambda x, w, at: torch.where(w[..., :1].unsqueeze(at) > 0, x, w[..., :1].unsqueeze(at)),
    "heads_beside_whole": lambda x, w, at: torch.cat([x, fitted(w, x).unsqueeze(at)], at).narrow(at, 0, x.shape[at]),
    "one_head_in_place": lambda x, w, at: _copied(x, lambda y: y.select(at, 0).mul_(2)),
    "whole_into_a_head": lambda x, w, at: _copied(x, lambda y: y.select(at, 0).copy_(fitted(w, y))),
    "heads_repeated": lambda x, w, at: x.repeat_interleave(2, at).narrow(at, 0, x.shape[at]),
    "heads_repeated_by_tensor": lambda x, w, at: x.repeat_interleave(torch.full((x.shape[at],), 2), at).narrow(
        at, 0, x.shape[at]
    ),
    "heads_tiled": lambda x, w, at: torch.cat([x, x], at).narrow(at, 1, x.shape[at]),
    "heads_merged_wrongly": lambda x, w, at: x.transpose(at, -1).contiguous().view(x.shape),
    "heads_through_batch": lambda x, w, at: x.flatten(0, 1).cumsum(0).view(x.shape) * 0.2,
}
EVEN_TRAP_HEADS: dict[str, Any] = {
    "rotary_by_whole": _by_whole,
    "complex_mean_over_heads": lambda x, w, at: _unpaired(_pairs(x) - _pairs(x).mean(at, keepdim=True)),
    "complex_plus_whole": lambda x, w, at: _unpaired(_pairs(x) + _pairs(fitted(w, x)).unsqueeze(at)),
}

for name, run in SAFE_HEADS.items():
    function(HEADS, name, run)
for name, run in EVEN_HEADS.items():
    function(HEADS, name, run, needs="even")
for name, run in TRAP_HEADS.items():
    function(HEADS, name, run, trap=True)
for name, run in EVEN_TRAP_HEADS.items():
    function(HEADS, name, run, trap=True, needs="even")
