"""`TensorParallel(model)`, compile and fit: every number is that of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import models
from tpkernels.testing.spawn import Pools

pytest.importorskip("keras")
pytestmark = pytest.mark.gloo
TIMEOUT = 240.0
"""Keras takes seconds to import, in each rank once."""


def optimizers() -> Iterator[tuple[str, dict[str, Any], Callable[[], Any]]]:
    """Name, options of the model's Dense layers, optimizer."""
    keras = models.keras_on_torch()
    kinds, regularizers, constraints = keras.optimizers, keras.regularizers, keras.constraints
    schedule = kinds.schedules.ExponentialDecay(1e-2, 3, 0.5)
    whole = {"kernel_regularizer": regularizers.OrthogonalRegularizer(0.1), "kernel_constraint": constraints.UnitNorm()}
    losses = {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
    yield CLIPNORM, losses, lambda: kinds.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.01)
    yield "global_clipnorm", {}, lambda: kinds.SGD(0.1, global_clipnorm=0.05)
    yield "clipvalue", {}, lambda: kinds.SGD(0.1, clipvalue=0.001)
    yield (
        SCHEDULE,
        whole,
        lambda: kinds.AdamW(schedule, weight_decay=0.1, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2),
    )
    yield "L2", {"kernel_regularizer": "l2"}, lambda: kinds.SGD(0.1)
    yield WHOLE, whole, lambda: kinds.SGD(0.1)
    yield "Ftrl", {}, lambda: kinds.Ftrl(1e-2)
    yield "Lion", {}, lambda: kinds.Lion(1e-3)
    for name in ("RMSprop", "Adam", "Adadelta", "Adagrad", "Adamax", "Nadam"):  # epsilon: not rounding by rounding
        yield name, {}, lambda name=name: getattr(kinds, name)(1e-2, epsilon=1e-3)


CLIPNORM = "L2 of weights and of activities, momentum, clipnorm"
WHOLE = "a regularizer and a constraint of the whole"
SCHEDULE = f"{WHOLE}; schedule, decay, average, accumulation"
FEW = ("global_clipnorm", SCHEDULE, "Adam")
MORE = (*FEW[:2], CLIPNORM)
"""Without --full.  The other optimizers differ in what they compute of an element."""


def every_optimizer(parallel: bool, names: tuple[str, ...] = ()) -> dict[str, Any]:
    found = {}
    plan: Any = "auto"
    for name, options, made in optimizers():
        if names and name not in names:
            continue
        model = models.small(seed=dist.get_rank() if parallel else 0, **options)
        optimizer = made()
        if parallel:
            split = name != CLIPNORM  # here slots of whole variables are whole
            chosen = "auto" if name == CLIPNORM else plan  # its losses of activities are proven, too
            model = tpk.keras.TensorParallel(model, plan=chosen, shard_optimizer_states=split)
            plan = plan if name == CLIPNORM else model.tensor_parallel_plan
        if dist.get_world_size() == 1:
            models.exact(model)
            object.__setattr__(optimizer, "_clip_by_norm", models.ExactClip(optimizer.clipnorm))
        found[name] = models.trained(model, optimizer, epochs=3)
    return found


def bound_of(name: str) -> float:
    """A nightly build of Keras 3.16 adds and multiplies float64 in float32, and Ftrl is written in such ops: rounding
    may then fall otherwise, where a gradient differs in its last bit."""
    one = models.keras_on_torch().ops.ones(1, "float64")
    return 1e-5 if name == "Ftrl" and models.keras_on_torch().ops.add(one, one).dtype == torch.float32 else models.BOUND


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.slow("14 s: every optimizer of Keras")
def test_optimizers_train_as_on_the_unsharded_model(ranks: Pools, world_size: int, full: bool) -> None:
    """Ranks start from different weights, and take rank 0's; the first model's plan serves for all."""
    if world_size > 2 and not full:
        pytest.skip("--full: three or four ranks, each of which imports Keras")
    names: tuple[str, ...] = FEW if world_size > 2 else () if full else MORE
    (expected,) = ranks(1).run(every_optimizer, False, names, timeout=TIMEOUT)
    if world_size == 2:  # one rank that is wrapped is what it was
        (alone,) = ranks(1).run(every_optimizer, True, FEW[:1], timeout=TIMEOUT)
        models.assert_equal(alone[FEW[0]], expected[FEW[0]], FEW[0])
    for found in ranks(world_size).run(every_optimizer, True, names, timeout=TIMEOUT):
        for name, numbers in found.items():
            models.assert_equal(numbers, expected[name], name, bound=bound_of(name))
        assert list(found) == list(expected) and set(names) <= set(found)
