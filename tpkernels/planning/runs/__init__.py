"""Runs of a model on fake tensors: which ops run on which tensors, and what flows from layer to layer."""
