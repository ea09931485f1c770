"""Tensor-parallel modules."""
