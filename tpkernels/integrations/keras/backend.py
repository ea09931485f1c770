"""Every name of Keras that Keras does not document, in one place, so that a new version breaks here and says so.

It owns how Keras is imported, and all reads and writes of private attributes.  The other files of this folder use what
keras.io documents, and the functions below.  :data:`PRIVATE_NAMES` lists what is used; :func:`missing_names` says which
of it a version lacks.  Known to work: Keras 3.13.2 and 3.15.1 (2026-11-23).
"""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tpkernels.packages import needed

PRIVATE_NAMES = {
    "get_device": ("keras.src.backend.torch.core:get_device", "keras.src.backend.torch.ops.core:get_device"),
    "metrics": ("keras.src.trainers.trainer:BaseTrainer.get_metrics_result",
                "keras.src.trainers.trainer:Trainer.get_metrics_result"),
    "global_seed_generator": ("keras.src.random.seed_generator:global_seed_generator",),
    "make_default_seed": ("keras.src.random.seed_generator:make_default_seed",),
    "layers": ("keras.src.layers.layer:Layer._flatten_layers",),
    "norms": ("keras.src.optimizers.base_optimizer:BaseOptimizer._clip_gradients",),
    "apply": ("keras.src.optimizers.base_optimizer:BaseOptimizer._backend_apply_gradients",),
    "keys": ("keras.src.optimizers.base_optimizer:BaseOptimizer._var_key",),
    "parameters": ("keras.src.backend.torch.layer:TorchLayer._track_variables",
                   "keras.src.backend.torch.layer:Layer._track_variables"),
    "store": ("keras.src.saving.saving_lib:H5IOStore.__getitem__",),
    "store files": ("keras.src.saving.saving_lib:H5IOStore._get_h5_file",),
    "stores": ("keras.src.saving.saving_lib:H5IOStore",),
    "backup": ("keras.src.callbacks.backup_and_restore:BackupAndRestore._save_model",),
    "swap": ("keras.src.callbacks.swap_ema_weights:SwapEMAWeights._backend_swap_variables",),
}  # fmt: skip
"""What is used of each, under a name of ours: module and name, one of which a version must have."""


def keras_module() -> Any:
    """Keras itself, imported when something needs it."""
    with needed("keras", "tpk.keras"):
        return importlib.import_module("keras")


def missing_names() -> list[str]:
    """What of :data:`PRIVATE_NAMES` the installed Keras does not have, in their order."""
    keras_module()
    return [" or ".join(places) for places in PRIVATE_NAMES.values() if not any(map(_found, places))]


def private(purpose: str) -> Any:
    """The first of the names that exists.

    Raises:
        ImportError: this Keras has none of them.
    """
    places = PRIVATE_NAMES[purpose]
    found = next((one for one in map(_found, places) if one is not None), None)
    if found is None:
        raise ImportError(f"Keras {keras_module().__version__} has no {' or '.join(places)}, which tpk.keras uses")
    return found


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        holder: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder


def check_backend(wanted: str = "torch") -> None:
    """Refuse a Keras that runs on another backend."""
    running = keras_module().config.backend()
    if running != wanted:
        raise ValueError(
            f"Keras runs on the backend {running!r}, and this needs {wanted!r}: set KERAS_BACKEND={wanted} in the "
            "environment before keras is imported for the first time"
        )


# ---------------------------------------------------------------- layers


def bare(instance: Any, name: str, value: Any) -> None:
    """Set an attribute past Keras, which would track layers and variables among the values."""
    object.__setattr__(instance, name, value)


def overwrite(instance: Any, name: str) -> bool:
    """Whether the instance itself, not its class, has ``name``."""
    return name in vars(instance)


def all_layers(model: Any) -> list[Any]:
    """The model and every layer in it, each once."""
    return list(dict.fromkeys(model._flatten_layers()))


def sublayers(layer: Any) -> list[Any]:
    """The layers that ``layer`` holds directly."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def variables_of(layer: Any) -> list[Any]:
    """The variables that the layer itself holds, without those of its sublayers."""
    seeds = [generator.state for generator in getattr(layer, "_seed_generators", [])]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def weights_of(layer: Any) -> list[Any]:
    """Those of them that are no states of random generators."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def seed_generators(layer: Any) -> list[Any]:
    return list(getattr(layer, "_seed_generators", []))


def kernel_of(layer: Any) -> Any:
    """The variable of a Dense or EinsumDense layer, without LoRA."""
    return layer._kernel


def table_of(layer: Any) -> Any:
    """The variable of an Embedding layer, without LoRA."""
    return layer._embeddings


def key_value_layers(layer: Any) -> list[Any]:
    """The layers that make keys and values, of an attention layer of Keras or KerasHub."""
    names = ("_key_dense", "key_dense", "_value_dense", "value_dense")
    return [made for made in (getattr(layer, name, None) for name in names) if made is not None]


def meaning_of(attribute: str) -> str:
    """The name by which the search knows a number of a layer: that of heads without an underscore, for example."""
    known = {"num_repeats": "num_key_value_groups", "_num_key_value_groups": "num_key_value_groups"}
    return known.get(attribute, attribute.removeprefix("_") if "head" in attribute else attribute)


def declared_inputs(model: Any) -> Any:
    """What a Functional or Sequential model says that it is called with; None for others."""
    inputs = getattr(model, "_inputs_struct", None)
    return inputs if inputs is not None else getattr(getattr(model, "_functional", None), "input", None)


def set_mask(output: Any, mask: Any) -> None:
    """Let the layers behind know which steps are padding."""
    output._keras_mask = mask


def draw_from_state(generator: Any) -> None:
    """Let a generator without a seed of the user's draw from its state: torch's default generator, from which Keras
    draws otherwise, would go on differently on each rank."""
    object.__setattr__(generator, "_initial_seed", 0)


def has_training_argument(layer: Any) -> bool:
    return bool(layer._call_has_training_arg)


def retrack(layers: Iterable[Any]) -> None:
    """Make torch's view of the layers' parameters that of the variables, after values were replaced."""
    for layer in layers:
        if hasattr(layer, "_torch_params"):
            layer._track_variables()


@contextmanager
def repeats_as_numbers() -> Iterator[None]:
    """Inside, ``keras.ops.repeat`` by a number is an op whose result has a known shape; in Keras 3.13 it is not."""
    try:
        module = importlib.import_module("keras.src.backend.torch.numpy")
    except ModuleNotFoundError:  # 3.16 has it elsewhere, and repeats by numbers
        yield
        return
    original = module.repeat

    def repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
        if isinstance(repeats, int) and isinstance(x, torch.Tensor) and axis is not None:
            return torch.repeat_interleave(x, repeats, dim=axis)
        return original(x, repeats, axis=axis)

    module.repeat = repeat  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.repeat = original  # type: ignore[attr-defined]


# ---------------------------------------------------------------- files


def _h5py() -> Any:
    with needed("h5py", "weight files of Keras"):
        return importlib.import_module("h5py")


def weight_file(file: Any) -> Any:
    """An HDF5 file, open for reading."""
    return _h5py().File(file, mode="r")


@contextmanager
def datasets_as(kind: Callable[[Any, Any], Any], member: Callable[[Any, str], Any]) -> Iterator[None]:
    """Inside, Keras's weight files give ``kind(dataset, dtype)`` where they would read a whole variable.

    What stands in an archive is opened as ``member(archive, name)``, or, where that is None, read by Keras.  So is what
    is no plain dataset, which Keras refuses.
    """
    h5py = _h5py()
    store, read, opened = private("stores"), private("store"), private("store files")

    def open_file(self: Any, path_or_io: Any, mode: str | None = None) -> Any:
        inside = member(self.archive, str(path_or_io)) if self.archive and (mode or self.mode) == "r" else None
        if inside is None:
            return opened(self, path_or_io, mode)
        self.io_file = inside
        return weight_file(inside)

    def get(self: Any, key: str) -> Any:
        group = self._h5_entry_group
        by_keras = self.archive and isinstance(self.io_file, zipfile.ZipExtFile)
        if by_keras or key not in group or group.get(key, getclass=True, getlink=True) is not h5py.HardLink:
            return read(self, key)
        dataset = group[key]
        if not isinstance(dataset, h5py.Dataset) or dataset.external or dataset.is_virtual:
            return read(self, key)
        rounded = dataset.attrs.get("dtype") == "bfloat16"
        return kind(dataset, importlib.import_module("ml_dtypes").bfloat16 if rounded else dataset.dtype)

    store.__getitem__, store._get_h5_file = get, open_file
    try:
        yield
    finally:
        store.__getitem__, store._get_h5_file = read, opened


# ---------------------------------------------------------------- variables


def raw_value(variable: Any) -> Any:
    """The tensor itself, whatever dtype a layer computes in."""
    return variable._value


def default_device() -> Any:
    """Where Keras makes tensors."""
    found = private("get_device")()
    return "cpu" if str(found) == "meta" else found


def device_type() -> str:
    return str(default_device()).partition(":")[0]


def global_seed_state() -> Any:
    """The state of the generator that serves random ops without a seed."""
    return private("global_seed_generator")().state


def torch_dtype(name: str) -> Any:
    """torch's dtype of that name."""
    return getattr(torch, name)


def plain_shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable._shape)


def set_shape(variable: Any, shape: Iterable[int]) -> None:
    variable._shape = tuple(shape)


def put_value(variable: Any, value: Any) -> None:
    """Replace the tensor of a variable, by one of any shape."""
    variable._value = value
    variable._shape = tuple(value.shape)


def off_meta(variable: Any) -> bool:
    """Give a variable of the meta device zeros in memory; whether it was on it."""
    value = raw_value(variable)
    if not value.is_meta:
        return False
    zeros = torch.zeros(value.shape, dtype=value.dtype, device=default_device())
    put_value(variable, torch.nn.Parameter(zeros, requires_grad=value.requires_grad))
    return True


def seed_anew(generator: Any) -> None:
    """Give a generator the state of a new one: its seed's, or one drawn from Python's random numbers."""
    seed = generator._initial_seed
    generator.state.assign([private("make_default_seed")() if seed is None else seed, 0])


def move(variable: Any, value: Any, layout: Any) -> None:
    """Give a variable of JAX's the layout that its value has."""
    variable._layout = layout
    variable._value = value


# ---------------------------------------------------------------- models


def base_metrics_result(model: Any) -> Any:
    """The metrics of this process alone: Keras 3.16 sums them over all processes, which here see the same batch.

    There the values are copies, as Keras's sums are: some metrics return a view of their state, which validation
    overwrites before callbacks read the results of training.  Earlier versions hand the views on, sharded or not.
    """
    found = private("metrics")(model)
    if _found(PRIVATE_NAMES["metrics"][0]) is None:
        return found
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def gather_only(callback: Any) -> None:
    """Let a ``BackupAndRestore`` gather weights, and write and remove nothing."""
    path = callback._weights_path
    bare(callback, "_save_model", lambda: callback.model.save_weights(filepath=path, overwrite=True))
    bare(callback, "on_train_end", lambda logs=None: None)


def after_swaps(callback: Any, work: Callable[[], None]) -> None:
    """Let a ``SwapEMAWeights`` do ``work`` each time it has exchanged weights and their averages."""

    def swap(optimizer: Any) -> None:
        type(callback)._backend_swap_variables(callback, optimizer)
        work()

    bare(callback, "_backend_swap_variables", swap)


def updates_of(optimizer: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How an optimizer applies gradients, and how it clips them."""
    return optimizer._backend_apply_gradients, optimizer._clip_gradients


def set_updates(optimizer: Any, apply: Callable[..., Any], clip: Callable[..., Any]) -> None:
    bare(optimizer, "_backend_apply_gradients", apply)
    bare(optimizer, "_clip_gradients", clip)


def rename_variables(optimizer: Any, original: Callable[[Any], Any]) -> None:
    """Let an optimizer know each variable by the name that it has for ``original(variable)``."""
    key = optimizer._var_key
    bare(optimizer, "_var_key", lambda variable: key(original(variable)))


def forget_functions(model: Any) -> None:
    """Forget the functions that earlier training or prediction has made."""
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)
