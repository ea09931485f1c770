"""More ranks than heads: attention that cannot be cut for that alone is an error, which says what to do."""

from __future__ import annotations

from torch import nn

from tpkernels.planning.proofs.decision import Decision
from tpkernels.planning.runs.layer_groups import SMALL_GROUP
from tpkernels.planning.splits import divisor

__all__ = ["refuse_more_ranks_than_heads"]


def refuse_more_ranks_than_heads(decision: Decision, world_size: int, model: nn.Module) -> None:
    """Refuse it, unless the model has other attention that can be cut.

    A dimension of one says nothing of heads (MRA's blocks have one): what is seen so is gathered.

    Raises:
        ValueError: there are more ranks than heads.
    """
    small = [(group, error) for group, error in decision.refused.items() if group.size <= SMALL_GROUP]
    most = max((error.count for _, error in small), default=0)
    enough = most >= max(2, divisor(world_size))  # in deeper stages of Swin
    if enough or any(proof.heads for proof in decision.proven.values()):
        return
    for group, error in small:
        if 1 < error.count < divisor(world_size):
            raise ValueError(
                f"{world_size} ranks are more than the {error.count} heads of "
                f"{group.columns[0].rpartition('.')[0] or type(model).__name__}: use at most {error.count} "
                f'ranks, or overrides={{"{group.columns[0]}": "replicate", ...}} for its layers'
            )
