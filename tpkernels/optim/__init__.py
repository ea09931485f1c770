"""Optimizers for tensor-parallel parameters: what torch.optim leaves open."""

from tpkernels.optim.master_weights import MasterWeights

__all__ = ["MasterWeights"]
