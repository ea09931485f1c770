"""``verify``: does a parallelized model compute what the unsharded one does?"""

from __future__ import annotations

import torch
from torch import nn

from tpkernels.comm.groups import GroupLike
from tpkernels.sharding.apply import parallelize
from tpkernels.verification.model_passes import Loss
from tpkernels.verification.verdict import Verification
from tpkernels.verification.verifier import Plan, Verifier

__all__ = ["verify"]


def verify(
    model: nn.Module,
    mesh: GroupLike,
    inputs: object = None,
    *,
    plan: Plan = "auto",
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
) -> Verification:
    """Compare the unsharded ``model`` with what :func:`parallelize` would make of it; all ranks call this together.

    Args:
        model: not parallelized yet; it is copied, and stays as it is.  One on the meta device is verified with small
            random weights.
        mesh, plan: as for :func:`parallelize`.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments; those on the meta device get random
            values.  None: the inputs that :func:`make_plan` would derive, with random values.
        loss: computes a scalar from what the model returns.  By default the result's own ``loss``, else the sum of all
            its floating-point tensors times fixed random weights.
        dtype: convert the copies (and floating-point inputs) to this dtype first.

    It compares every tensor that the model returns (but caches, of which a rank keeps its own part), the loss, the
    gradients of all parameters and of those inputs that require one, and the buffers after the pass.  An error may be
    8 times as large as the unsharded model's own, element by element (:mod:`tpkernels.verification.bounds`).  A model
    in fp64 may be as inexact as fp32 is.  Dropout and jitter are off; otherwise the model stays in its mode.

    Beside the model a rank holds at most two copies of it, one of them in fp64, with gradients and activations; where
    something differs also the inputs and outputs of all modules, in three dtypes.

    One rounding may change much where a model is not continuous: the gradient of a relu whose input passes 0, the
    choice of an expert.  What is over the bound is therefore compared with more passes of the unsharded model.  In
    bf16 such a jump can still look like a difference; a note then says whether fp32 shows one, too.

    Examples:
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> tpk.verify(mlp, mesh["tp"], torch.randn(4, 8)).ok
        True

    Raises:
        ValueError: weights or inputs that differ between ranks, inputs that the model does not run with, a model that
            cannot be copied or is parallel already, a plan that :func:`parallelize` refuses; on every rank.
    """
    return Verifier(model, mesh, inputs, plan, loss, dtype, parallelize).verify()
