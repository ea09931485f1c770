"""Megatron-Core: our ops in its layers."""
