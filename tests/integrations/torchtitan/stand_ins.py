"""In the place of CUDA, of packages that torchtitan's trainers import and never call, and of fp32 in exact runs."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

UNUSED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torchdata": (),
    "torchdata.stateful_dataloader": ("StatefulDataLoader",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}
"""What torchtitan's trainer imports and these runs never call, by module."""


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """Where such a package is not installed, each name of it is an empty class."""
    needs = {"torch": "tensorboard"}
    missing = [name for name in UNUSED if importlib.util.find_spec(needs.get(top := name.split(".")[0], top)) is None]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update({wanted: type(wanted, (), {}) for wanted in UNUSED[name]})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


@contextlib.contextmanager
def on_cpu(utilities: Any, division: str) -> Iterator[None]:
    """In the place of CUDA: all modules of torchtitan's that name the device, and its monitor of CUDA's memory.

    Args:
        utilities: the module ``torchtitan.distributed.utils``.
        division: where torchtitan looks for its ``disable_fsdp_gradient_division``.
    """
    stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    module, _, name = division.rpartition(".")
    disable = getattr(sys.modules[module], name)

    def sums(model: Any) -> None:
        """As torchtitan does, by gloo, which does not multiply before it adds."""
        disable(model)
        for one in model.modules():
            if isinstance(one, FSDPModule):
                one.set_force_sum_reduction_for_comms(True)

    with contextlib.ExitStack() as stack:
        for name, module_of_it in list(sys.modules.items()):
            if name.startswith("torchtitan"):
                for attribute, value in (("device_type", "cpu"), ("device_module", torch.cpu)):
                    if attribute in vars(module_of_it):
                        stack.enter_context(mock.patch.object(module_of_it, attribute, value))
        stack.enter_context(mock.patch("torchtitan.components.metrics.build_device_memory_monitor", lambda: monitor))
        stack.enter_context(mock.patch.dict("os.environ", LOCAL_RANK="0"))
        stack.enter_context(mock.patch("time.sleep"))  # at the end it waits for the other ranks, two seconds
        stack.enter_context(mock.patch.object(utilities, "set_pg_timeouts"))  # its barrier names a device of CUDA
        stack.enter_context(mock.patch(division, sums))
        stack.callback(gc.enable)  # which torchtitan calls by itself, every 50 steps
        yield


@contextlib.contextmanager
def exactly(wanted: bool) -> Iterator[None]:
    """torchtitan's rotary embedding and loss compute in fp32: where the run is to be exact, they do not."""
    if not wanted:
        yield
        return
    types = mock.patch.dict("torchtitan.config.TORCH_DTYPE_MAP", float64=torch.float64)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), types:
        yield
