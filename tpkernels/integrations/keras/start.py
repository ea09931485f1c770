"""What the ranks agree on before a model is cut: who they are, equal weights, seeds and random generators.

It owns the checks of :class:`~tpkernels.integrations.keras.parallel.TensorParallel`'s arguments, which raise on every
rank before anything changes, and the broadcast of rank 0's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm.groups import resolve
from tpkernels.comm.startup import init
from tpkernels.integrations.keras import backend
from tpkernels.nn.host_generators import take_first_states
from tpkernels.ops.agreed_call import exchange
from tpkernels.ops.mesh_exchange import broadcast

__all__ = [
    "BACKENDS",
    "check_backend_name",
    "check_devices",
    "check_world_size",
    "join",
    "same_generators",
    "same_values",
    "same_variables",
]

BACKENDS = ("auto", "torch", "gloo", "nccl", "jax")


def check_backend_name(distributed_backend: str) -> None:
    """Refuse a backend that does not exist, or does not fit the one that Keras runs on."""
    if distributed_backend not in BACKENDS:
        raise ValueError(f"distributed_backend must be one of {list(BACKENDS)}, got {distributed_backend!r}")
    running = backend.keras_module().config.backend()
    if running not in ("torch", "jax"):
        raise ValueError(
            f"Keras runs on the backend {running!r}, and tpk.keras needs 'torch' or 'jax': set KERAS_BACKEND before "
            "keras is imported for the first time"
        )
    if (distributed_backend == "jax") != (running == "jax") and distributed_backend != "auto":
        raise ValueError(
            f"distributed_backend {distributed_backend!r} does not fit Keras's backend, which is {running!r}: set "
            "KERAS_BACKEND before keras is imported, or pass 'auto'"
        )
    if _without_devices(distributed_backend):
        raise ValueError("distributed_backend 'nccl' needs CUDA devices, and this process sees none: pass 'gloo'")


def join(distributed_backend: str) -> dist.ProcessGroup:
    """The process group of all ranks that run.  A name that is no backend, or has no devices here, joins as "auto"
    does: the ranks can then tell each other what is wrong with it."""
    device = {"gloo": "cpu", "nccl": "cuda"}.get(str(distributed_backend))
    if device is None or _without_devices(distributed_backend):
        device = backend.device_type()
    return init(device=device)["tp"].get_group()


def _without_devices(distributed_backend: str) -> bool:
    return distributed_backend == "nccl" and not torch.cuda.is_available()


def check_world_size(world_size: int | None) -> None:
    """Refuse another number of ranks than that which runs."""
    ranks = dist.get_world_size()
    if world_size is not None and world_size != ranks:
        raise ValueError(
            f"world_size is {world_size}, and {ranks} rank{'s' if ranks > 1 else ''} run: start the script with "
            f"`torchrun --nproc_per_node {world_size} script.py` or `tpkernels run --tp {world_size} script.py`, or "
            "leave world_size out"
        )


def check_devices(device_ids: Sequence[str] | None, world_size: int) -> None:
    """Refuse a list of devices that is not one per rank, all of one kind that Keras runs on."""
    if device_ids is None:
        return
    if not isinstance(device_ids, list | tuple) or not all(isinstance(one, str) for one in device_ids):
        raise ValueError(f"device_ids must be a list of names such as 'cpu:0' or 'cuda:1', got {device_ids!r}")
    if len(device_ids) != world_size:
        raise ValueError(f"device_ids has {len(device_ids)} names, and there are {world_size} ranks: one name per rank")
    kinds = sorted({one.partition(":")[0].lower().replace("gpu", "cuda") for one in device_ids})
    here = backend.device_type()
    if kinds != [here]:
        raise ValueError(f"device_ids are of the kind {', '.join(kinds)}, and Keras computes on {here!r} here")


def same_variables(variables: Sequence[Any], pg: dist.ProcessGroup) -> None:
    """Give every rank the first rank's values, seeds of dropout among them.

    Raises:
        ValueError: the ranks have unlike models; every rank raises, and nothing has changed.
    """
    group = resolve(pg)
    if group.size == 1:
        return
    mine = {
        variable.path: [list(backend.plain_shape(variable)), variable.dtype, backend.raw_value(variable).is_meta]
        for variable in variables
    }
    said = exchange(group, "the variables of a Keras model", mine)
    for rank, other in enumerate(said):
        if other != said[0]:
            unlike = sorted(path for path in {*other, *said[0]} if other.get(path) != said[0].get(path))
            raise ValueError(f"ranks 0 and {rank} have different models: variable {unlike[0]!r} differs")
    same_values(variables, pg)


def same_values(variables: Sequence[Any], pg: dist.ProcessGroup) -> None:
    """Give every rank the first rank's values of variables that have the same shapes everywhere."""
    for variable in variables:
        _from_first(backend.raw_value(variable), pg)


def _from_first(tensor: Tensor, pg: dist.ProcessGroup) -> None:
    if tensor.is_meta or not tensor.numel():
        return
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8)
        broadcast([resolve(pg)], "a variable of a Keras model", data)
        tensor.copy_(flat.view(tensor.shape))


def same_generators(pg: dist.ProcessGroup) -> None:
    """Continue with the first rank's random numbers, so that shuffles agree: Python's, NumPy's, torch's and Keras's."""
    group = resolve(pg)
    if group.size == 1:
        return
    what = "random generators of a Keras model"
    take_first_states(group, what)
    state = torch.get_rng_state()
    broadcast([group], what, state)
    torch.set_rng_state(state)
    _from_first(backend.raw_value(backend.global_seed_state()), pg)
