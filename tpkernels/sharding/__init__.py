"""Sharding of whole models: ``make_plan`` finds out how, ``parallelize`` does it; the styles that plans are made of."""

from tpkernels.sharding.apply import parallelize
from tpkernels.sharding.infer import make_plan
from tpkernels.sharding.plan import ShardingPlan
from tpkernels.sharding.styles import Column, CopiedHeads, Features, Replicate, Row, Vocabulary

__all__ = [
    "Column",
    "CopiedHeads",
    "Features",
    "Replicate",
    "Row",
    "ShardingPlan",
    "Vocabulary",
    "make_plan",
    "parallelize",
]
