"""What a wrapped model remembers, and its files: whole variables, written by rank 0 under the model's own class.

It owns :class:`Parallel`, the state of a model, and every call that writes or reads files (``save``, ``save_weights``,
``load_weights``, and KerasHub's ``save_to_preset`` and others), of the model and of models inside of it, such as a
task's backbone.  Every rank makes them; to write, the others send their parts to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.plan import KerasPlan
from tpkernels.integrations.keras.shadow import named_layers
from tpkernels.integrations.keras.stored import unread
from tpkernels.integrations.keras.variables import Shards, checked_only
from tpkernels.state.collective_errors import Ranks

__all__ = ["Parallel", "by_methods", "hub_files", "loaded", "part_files", "plain", "state_of", "try_out", "written"]

_HUB_WRITES = ("save_to_preset", "save_task_weights", "save_lora_weights")
_HUB_READS = ("load_task_weights", "load_lora_weights")
"""Methods of KerasHub's tasks and backbones, with a path as their first argument."""


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
    kind = type(model)
    if kind is state.kind:  # inside of another such context
        yield kind
        return
    layers = named_layers(model)
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

    what = _same_file(Ranks([state.shards.pg]), method, filepath)
    state.shards.served(what, write)


def loaded(
    state: Parallel,
    model: Any,
    method: str,
    load: Callable[..., Any],
    variables: Sequence[Any],
    filepath: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``load`` a file for ``model`` into ``variables`` on every rank, which reads its parts.

    Raises:
        ValueError: on every rank, if it fails on one; nothing changes on any.
    """

    def read() -> None:
        with unread():
            load(model, filepath, *args, **kwargs)

    ranks = Ranks([state.shards.pg])
    what = _same_file(ranks, method, filepath)
    ranks.step(what, lambda: try_out(read, variables))
    ranks.step(what, read)


def try_out(read: Callable[[], None], variables: Sequence[Any]) -> None:
    """``read`` a file, and change no variable.

    Raises:
        ValueError, OSError: it cannot be read, or is not for these variables.
    """
    try:
        with checked_only(variables):
            read()
    except (ValueError, OSError):
        raise
    except Exception as error:  # damaged files raise whatever their readers do: KeyError, BadZipFile, ...
        raise ValueError(f"this cannot be read as a weight file: {type(error).__name__}: {error}") from error


def _same_file(ranks: Ranks, method: str, filepath: Any) -> str:
    """The call of ``method`` in words, once all ranks are known to name the same file."""
    names = [one["file"] for one in ranks.exchange(method, {"file": str(filepath)})]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise ValueError(f"{method}: rank 0 names {names[0]!r}, rank {rank} {name!r}: pass the same name")
    return f"{method}({names[0]!r})"


def by_methods(kind: Any) -> dict[str, Callable[..., Any]]:
    """Members of a wrapped model's class: Keras's functions that write it (``keras.saving.save_model``) are refused.

    They would write the same file from every rank.  Pickling and ``copy.deepcopy`` give each rank a whole model.
    """

    def save_own_variables(self: Any, store: Any) -> None:
        raise ValueError(
            "all ranks would write one file: call the parallel model's own save or save_weights, of which rank 0 "
            "writes whole variables, in the place of functions of keras.saving"
        )

    def __reduce__(self: Any) -> Any:
        with plain(self):
            return kind.__reduce__(self)

    return {"save_own_variables": save_own_variables, "__reduce__": __reduce__}


def hub_files(kind: type) -> dict[str, Callable[..., None]]:
    """Those of KerasHub's methods that ``kind`` has, for the class of a wrapped model."""
    writers = {name: _writer(name) for name in _HUB_WRITES if hasattr(kind, name)}
    return writers | {name: _reader(name) for name in _HUB_READS if hasattr(kind, name)}


def _writer(name: str) -> Callable[..., None]:
    def write(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        written(self, name, filepath, *args, **kwargs)

    write.__name__ = name
    write.__doc__ = f"KerasHub's ``{name}``, by every rank: whole variables, written by rank 0."
    return write


def _reader(name: str) -> Callable[..., None]:
    def read(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        state = state_of(self)
        loaded(state, self, name, getattr(state.kind, name), self.variables, filepath, *args, **kwargs)

    read.__name__ = name
    read.__doc__ = (
        f"KerasHub's ``{name}``, by every rank, which reads its parts; on an error nothing changes on any rank."
    )
    return read


# ------------------------------------------------------------------ of models inside of the model


def part_files(model: Any) -> None:
    """Let the models inside of ``model`` write and read whole variables as it does."""
    made = [(("save", "save_weights", *_HUB_WRITES), _part_writer), (("load_weights", *_HUB_READS), _part_reader)]
    inside = [layer for name, layer in named_layers(model).items() if name]
    for methods, make in made:
        for layer in inside:
            for method in methods:
                if hasattr(layer, method):
                    backend.bare(layer, method, make(model, layer, method))


def _part_writer(model: Any, part: Any, method: str) -> Callable[..., None]:
    def write(filepath: Any, *args: Any, **kwargs: Any) -> None:
        state, save = state_of(model), getattr(type(part), method)
        if state.shards.serving:  # a preset of the whole model has its backbone write a file
            save(part, filepath, *args, **kwargs)
            return
        state.check_loaded()

        def on_rank_0() -> None:
            with plain(model), state.shards.whole_shapes():
                save(part, filepath, *args, **kwargs)

        state.shards.served(_same_file(Ranks([state.shards.pg]), method, filepath), on_rank_0)

    return write


def _part_reader(model: Any, part: Any, method: str) -> Callable[..., None]:
    def read(filepath: Any, *args: Any, **kwargs: Any) -> None:
        loaded(state_of(model), part, method, getattr(type(part), method), part.variables, filepath, *args, **kwargs)

    return read
