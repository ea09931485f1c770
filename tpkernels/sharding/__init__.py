"""Sharding of whole models: ``parallelize`` and the styles that its plans are made of."""

from tpkernels.sharding.apply import parallelize
from tpkernels.sharding.styles import Column, Replicate, Row

__all__ = ["Column", "Replicate", "Row", "parallelize"]
