"""What a wrapped model remembers, and how it is written: whole variables, by rank 0, under the model's own class.

It owns :class:`Parallel`, the state of a model, and every call that writes files (``save``, ``save_weights``, and
KerasHub's ``save_to_preset`` and ``save_task_weights``).  Every rank makes them; the others send their parts to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.plan import KerasPlan
from tpkernels.integrations.keras.shadow import named_layers
from tpkernels.integrations.keras.variables import Shards
from tpkernels.state.collective_errors import Ranks

__all__ = ["Parallel", "plain", "same_file", "state_of", "writers", "written"]

_WRITERS = ("save_to_preset", "save_task_weights")
"""Methods of KerasHub's tasks and backbones that write files, with a path as their first argument."""


@dataclass
class Parallel:
    """What a wrapped model remembers."""

    kind: type
    plan: KerasPlan
    shards: Shards
    shard_optimizer_states: bool
    unloaded: bool = False
    """It was built on the meta device, and has no weights yet."""

    def check_loaded(self) -> None:
        if self.unloaded:
            raise ValueError("the model was built on the meta device and has no weights yet: call load_weights first")


def state_of(model: Any) -> Parallel:
    found: Parallel = vars(model)["tensor_parallel"]
    return found


@contextmanager
def plain(model: Any) -> Iterator[Any]:
    """Inside, the model has its own class and the numbers of the whole model, as its configuration says them."""
    state = state_of(model)
    layers = named_layers(model)
    kind = type(model)
    model.__class__ = state.kind
    for numbers in state.plan.numbers:
        backend.bare(layers[numbers.name], numbers.attribute, numbers.whole)
    try:
        yield state.kind
    finally:
        model.__class__ = kind
        for numbers in state.plan.numbers if state.shards.world_size > 1 else ():
            backend.bare(layers[numbers.name], numbers.attribute, numbers.ranks[state.shards.rank])


def written(model: Any, method: str, filepath: Any, *args: Any, **kwargs: Any) -> None:
    state = state_of(model)
    state.check_loaded()

    def write() -> None:
        with plain(model) as kind, state.shards.whole_shapes():
            getattr(kind, method)(model, filepath, *args, **kwargs)

    what = same_file(Ranks([state.shards.pg]), method, filepath)
    state.shards.served(what, write)


def same_file(ranks: Ranks, method: str, filepath: Any) -> str:
    """The call of ``method`` in words, once all ranks are known to name the same file."""
    names = [one["file"] for one in ranks.exchange(method, {"file": str(filepath)})]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise ValueError(f"{method}: rank 0 names {names[0]!r}, rank {rank} {name!r}: pass the same name")
    return f"{method}({names[0]!r})"


def writers(kind: type) -> dict[str, Callable[..., None]]:
    """Those of KerasHub's methods that ``kind`` has, for the class of a wrapped model."""
    return {name: _writer(name) for name in _WRITERS if hasattr(kind, name)}


def _writer(name: str) -> Callable[..., None]:
    def write(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        written(self, name, filepath, *args, **kwargs)

    write.__name__ = name
    write.__doc__ = f"KerasHub's ``{name}``, by every rank: whole variables, written by rank 0."
    return write
