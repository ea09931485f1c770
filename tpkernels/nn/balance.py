"""Balance of a mixture's experts: losses on the router, and a bias that needs none.

Tokens may be cut over ranks.  ``group`` then names whose tokens belong together: one group, or several (the axes of a
mesh), over which numbers are summed one after the other.  All ranks get the same result, bit for bit, and the gradient
of each rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.ops import Routing, all_reduce

__all__ = ["ExpertBias", "load_balancing_loss", "router_z_loss"]

Groups = GroupLike | Sequence[GroupLike] | None


def load_balancing_loss(probabilities: Tensor, experts: Tensor, group: Groups = None) -> Tensor:
    """The auxiliary loss of the Switch Transformer: 1 where all experts are chosen alike, up to E.

    ::

        share[e] = how many of the T * k chosen experts are e, over T * k                        of all ranks' tokens
        mean[e]  = sum over tokens of probabilities[:, e] / T                                    likewise
        loss     = E * sum_e share[e] * mean[e]

    ``probabilities`` are the router's, ``[..., E]``, after its softmax; ``experts``, ``[..., k]``, those it chose.  The
    loss of transformers (``load_balancing_loss_func``) is k times as large.

    Examples:
        >>> scores = torch.tensor([[0.7, 0.3], [0.4, 0.6]])
        >>> tpk.nn.load_balancing_loss(scores, scores.topk(1).indices, mesh["tp"])
        tensor(1.)

    Raises:
        ValueError: shapes that do not fit.
    """
    if experts.shape[:-1] != probabilities.shape[:-1]:
        raise ValueError(
            f"experts ({tuple(experts.shape)}) must have the tokens of probabilities ({tuple(probabilities.shape)})"
        )
    num_experts, top_k = probabilities.shape[-1], experts.shape[-1]
    flat = probabilities.reshape(-1, num_experts).to(_wide(probabilities))
    counts = _counts(experts, num_experts, flat)
    count = flat.new_tensor([float(flat.shape[0])])
    sums = _summed(torch.cat([flat.sum(0), counts, count]), group)
    mass, counts, tokens = sums.split([num_experts, num_experts, 1])
    tokens = tokens.detach().clamp(min=1)
    loss: Tensor = num_experts * ((counts.detach() / (tokens * top_k)) * (mass / tokens)).sum()
    return loss


def router_z_loss(logits: Tensor, group: Groups = None) -> Tensor:
    """The mean over all tokens of ``logsumexp(logits)^2``, which keeps the router's logits small (ST-MoE).

    Examples:
        >>> tpk.nn.router_z_loss(torch.zeros(2, 3, 8), mesh["tp"])
        tensor(4.3241)
    """
    squares = logits.to(_wide(logits)).logsumexp(-1).square().reshape(-1)
    total, tokens = _summed(torch.stack([squares.sum(), squares.new_tensor(float(len(squares)))]), group).unbind()
    return total / tokens.detach().clamp(min=1)


class ExpertBias(nn.Module):
    """A bias per expert that only the choice sees, moved against the load: balance without a loss (DeepSeek-V3).

    :meth:`forward` chooses the k experts of the largest ``scores + bias`` and returns a
    :class:`~tpkernels.Routing` with the scores themselves, and counts.  :meth:`update`, once per optimizer step, sums
    the counts over the ranks and moves every bias by ``rate``: down where an expert had more than the mean, else up.

    Args:
        rate: of the update; 0.001 in DeepSeek-V3.

    The bias is a buffer in fp32, part of the state, the same on all ranks.

    Examples:
        >>> choice = tpk.nn.ExpertBias(4, top_k=2)
        >>> routing = choice(torch.tensor([[0.1, 0.9, 0.8, 0.2]] * 3))
        >>> choice.update(mesh["tp"])
        >>> choice.bias
        tensor([ 0.0010, -0.0010, -0.0010,  0.0010])

    Raises:
        ValueError: fewer experts than ``top_k``, or scores of another number of experts.
    """

    bias: Tensor
    counts: Tensor

    def __init__(
        self, num_experts: int, top_k: int, *, rate: float = 1e-3, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to num_experts ({num_experts}), got {top_k}")
        self.top_k, self.rate = top_k, rate
        self.register_buffer("bias", torch.zeros(num_experts, device=device))
        # In fp64: whole numbers of any training step.
        counts = torch.zeros(num_experts, dtype=torch.float64, device=device)
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, scores: Tensor) -> Routing:
        """``scores``: ``[..., E]``, of any dtype; the routing's weights have it, and gradients."""
        if scores.shape[-1] != len(self.bias):
            raise ValueError(f"scores must be [..., {len(self.bias)}], got shape {tuple(scores.shape)}")
        experts = (scores.detach() + self.bias).topk(self.top_k, -1).indices
        if self.training:
            self.counts += _counts(experts, len(self.bias), self.counts)
        return Routing(experts, scores.gather(-1, experts))

    @torch.no_grad()
    def update(self, group: Groups = None) -> None:
        """Move the bias, and count anew; ``group``: whose tokens were counted, all that the step has seen."""
        counts = _summed(self.counts, group)
        self.bias += self.rate * torch.sign(counts.mean() - counts).to(self.bias.dtype)
        self.counts.zero_()

    def extra_repr(self) -> str:
        return f"num_experts={len(self.bias)}, top_k={self.top_k}, rate={self.rate}"


def _counts(experts: Tensor, num_experts: int, like: Tensor) -> Tensor:
    return experts.reshape(-1).bincount(minlength=num_experts).to(like.dtype)


def _summed(values: Tensor, group: Groups) -> Tensor:
    groups = [] if group is None else list(group) if isinstance(group, Sequence) else [group]
    for one in groups:
        axes = [one.get_group(axis) for axis in range(one.ndim)] if isinstance(one, DeviceMesh) else [one]
        for axis in axes:
            values = all_reduce(values, axis)
    return values


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
