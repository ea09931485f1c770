"""Sequence parallelism for whole models."""

from __future__ import annotations

from torch import nn

from tpkernels.sharding.examples import Observation
from tpkernels.sharding.plan import ShardingPlan

__all__ = ["with_sequence_parallel"]


def with_sequence_parallel(plan: ShardingPlan, model: nn.Module, observation: Observation | None) -> ShardingPlan:
    """The same plan with the residual stream cut along the sequence."""
    raise ValueError(f"sequence_parallel is not planned for {plan.model}; use explicit styles")
