"""Sums over the ranks in one CUDA kernel, for ``symmetric``: whole calls, of little data."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import DTYPES
from tpkernels.backends.symmetric.cuda_group import Norm
from tpkernels.ops.contract import Context, ResidualNorm

__all__ = ["one_shot", "one_shot_norm", "two_shot"]


def one_shot(channel: Channel, context: Context, op: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """A whole call in one kernel, in which everybody sums everything."""
    part = channel.device.library.one_shot_slot_bytes(x.numel() * x.element_size())
    return _sum_in_one_kernel(channel, context, op, x, bias, channel.size * part, two_steps=False)


def two_shot(channel: Channel, context: Context, op: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """A whole call in one kernel, in which everybody sums a share and sends the sums."""
    num_bytes = channel.device.library.two_shot_slot_bytes(x.numel() * x.element_size(), channel.size)
    return _sum_in_one_kernel(channel, context, op, x, bias, num_bytes, two_steps=True)


def one_shot_norm(channel: Channel, context: Context, x: Tensor, bias: Tensor | None, tail: ResidualNorm) -> Tensor:
    """:func:`one_shot`, and what follows it, in the same kernel."""
    out, part = torch.empty_like(x), channel.device.library.one_shot_slot_bytes(x.numel() * x.element_size())
    channel.prepare(channel.size * part, context.fingerprint, context.text)
    residual, weight, normed, scales = (t.data_ptr() for t in (tail.residual, tail.weight, tail.normed, tail.scales))
    norm = Norm(residual, weight, normed, scales, tail.eps)
    channel.group.all_reduce_norm(
        channel.one_shot("matmul_all_reduce"), norm, dtype=DTYPES[x.dtype], x=x.data_ptr(), out=out.data_ptr(),
        rows=x.shape[0], columns=x.shape[1], bias=0 if bias is None else bias.data_ptr(),
        stream=channel.device.stream(),
    )  # fmt: skip
    return out


def _sum_in_one_kernel(
    channel: Channel, context: Context, op: str, x: Tensor, bias: Tensor | None, slot_bytes: int, *, two_steps: bool
) -> Tensor:
    out = torch.empty_like(x)
    channel.prepare(slot_bytes, context.fingerprint, context.text)
    channel.group.all_reduce(
        channel.one_shot(op), dtype=DTYPES[x.dtype], x=x.data_ptr(), out=out.data_ptr(),
        rows=x.shape[0], columns=x.shape[1], bias=0 if bias is None else bias.data_ptr(),
        stream=channel.device.stream(), two_steps=two_steps,
    )  # fmt: skip
    return out
