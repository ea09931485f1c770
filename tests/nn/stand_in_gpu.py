"""As much of a GPU as random numbers need, on a machine without one: a default generator beside the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

__all__ = ["stand_in_gpu"]


@contextmanager
def stand_in_gpu(*, in_use: bool = True) -> Iterator[torch.Generator]:
    """Inside, ``torch.cuda`` keeps the state of the generator that this yields: draw from it what a GPU would.

    in_use: whether this process has done something on it already.
    """
    generator = torch.Generator()
    generator.manual_seed(11)  # alike on all ranks, as torch.manual_seed leaves it
    with mock.patch.multiple(
        torch.cuda,
        current_device=lambda: 0,
        is_initialized=lambda: in_use,
        manual_seed=generator.manual_seed,
        get_rng_state=lambda device=0: generator.get_state(),
        set_rng_state=lambda state, device=0: generator.set_state(state),
    ):
        yield generator
