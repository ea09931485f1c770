"""Keras on JAX: one process, N devices, and Keras's own ``ModelParallel`` with the layouts of a plan.

It owns the layout map (:func:`layout_map`), and how an existing model is moved onto the devices, and the optimizer's
slots.  JAX refuses dimensions that do not divide, so such variables stay whole, which is said in a warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.clones import constructor
from tpkernels.integrations.keras.plan import KerasPlan
from tpkernels.integrations.keras.refused import refuse_late
from tpkernels.integrations.keras.rules import rules_plan
from tpkernels.integrations.keras.saved import try_out

__all__ = ["layout_map", "on_devices", "wrap"]

AXES = ("batch", "model")


def layout_map(plan: KerasPlan | str, device_mesh: Any) -> Any:
    """A ``keras.distribution.LayoutMap`` that cuts what ``plan`` cuts, on the axis "model" of ``device_mesh``.

    Args:
        plan: of :func:`make_plan`, or its JSON, which may have been made on torch.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(8)])
        >>> mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
        >>> [layout.axes for layout in tpk.keras.layout_map(tpk.keras.make_plan(model, 2), mesh).values()]
        [(None, 'model'), ('model',), ('model', None)]

    Raises:
        ValueError: the mesh has no axis "model", or as many devices on it as the plan has no ranks.
    """
    keras = backend.keras_module()
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise ValueError(f"device_mesh must be a keras.distribution.DeviceMesh, got {device_mesh!r}")
    plan = KerasPlan.from_json(plan) if isinstance(plan, str) else plan
    if not isinstance(plan, KerasPlan):
        raise ValueError(f"plan must be a plan of make_plan or its JSON, got {plan!r}")
    if AXES[1] not in device_mesh.axis_names:
        raise ValueError(f"device_mesh must have an axis {AXES[1]!r}, got {list(device_mesh.axis_names)}")
    devices = device_mesh.shape[list(device_mesh.axis_names).index(AXES[1])]
    if devices != plan.world_size:
        raise ValueError(f"the plan is for {plan.world_size} ranks, and the mesh has {devices} devices on 'model'")
    layouts, whole = keras.distribution.LayoutMap(device_mesh), []
    for path, cut in plan.cuts.items():
        if cut.shape[cut.dim] % devices:
            whole.append(f"{path} ({cut.shape[cut.dim]})")
            continue
        axes: list[str | None] = [None] * len(cut.shape)
        axes[cut.dim] = AXES[1]
        layouts[f"^{re.escape(path)}$"] = tuple(axes)
    if whole:
        warnings.warn(
            f"these stay whole, because {devices} devices do not divide them: {', '.join(whole)}", stacklevel=2
        )
    return layouts


_METHODS = (
    "compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "save", "export",
    "save_weights", "get_config", "to_json", "summary", "count_params", "get_weights", "set_weights",
    "__call__",
)  # fmt: skip
"""What runs as the model's own class, in the scope of its distribution."""


@dataclass
class Moved:
    """What a model on devices remembers."""

    kind: type
    plan: KerasPlan
    distribution: Any
    shard_optimizer_states: bool


class OnDevices:
    """The methods of a model whose variables JAX has cut."""

    @property
    def tensor_parallel_plan(self) -> KerasPlan:
        """What was cut, and why."""
        plan: KerasPlan = vars(self)["tensor_parallel"].plan
        return plan

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's ``load_weights``, the optimizer's state included; on an error nothing changes.

        Raises:
            ValueError: the file is damaged, missing or for another model.
        """
        moved: Moved = vars(self)["tensor_parallel"]
        optimizer: Any = getattr(self, "optimizer", None)
        variables = list(self.variables)  # type: ignore[attr-defined]

        def read() -> None:
            moved.kind.load_weights(self, filepath, *args, **kwargs)  # type: ignore[attr-defined]

        with moved.distribution.scope():
            if optimizer is not None:
                _build(self, moved)
                variables += optimizer.variables
            try:
                try_out(read, variables)
            except OSError as error:
                raise ValueError(f"load_weights({str(filepath)!r}): {error}") from error
            read()


def _in_scope(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved: Moved = vars(self)["tensor_parallel"]
        kind = type(self)
        self.__class__ = moved.kind  # so that what is saved says its own class
        try:
            with moved.distribution.scope():
                if name in ("fit", "train_on_batch"):
                    _build(self, moved)
                result = getattr(moved.kind, name)(self, *args, **kwargs)
                if name == "compile":
                    _move_compiled(self, moved.distribution)
                return result
        finally:
            self.__class__ = kind

    method.__name__ = name
    return method


for _name in _METHODS:
    setattr(OnDevices, _name, _in_scope(_name))


def wrap(
    model: Any,
    world_size: int | None,
    device_ids: Sequence[str] | None,
    plan: KerasPlan | str,
    shard_optimizer_states: bool,
    base: type,
) -> Any:
    """Move a model onto the devices, and give it a class under ``base`` that trains it there.

    Raises:
        ValueError: the devices are not those asked for, or the plan is not for this model; nothing has changed.
    """
    chosen, distribution = on_devices(model, world_size, device_ids, plan)
    kind = type(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    model.__class__ = type(kind.__name__, (OnDevices, base, kind), names | constructor(kind))
    backend.bare(model, "tensor_parallel", Moved(kind, chosen, distribution, shard_optimizer_states))
    backend.forget_functions(model)
    _move_compiled(model, distribution)
    if chosen.world_size > 1:
        refuse_late(backend.all_layers(model))
    return model


def on_devices(
    model: Any, world_size: int | None, device_ids: Sequence[str] | None, plan: KerasPlan | str
) -> tuple[KerasPlan, Any]:
    """Move a model onto the devices; the plan, and the distribution in whose scope it trains."""
    keras = backend.keras_module()
    found = keras.distribution.list_devices()
    if device_ids is not None:
        known = isinstance(device_ids, list | tuple) and all(one in found for one in device_ids)
        if not known or len(set(device_ids)) != len(device_ids) or not device_ids:
            raise ValueError(f"device_ids must be a list of some of {found}, each once, got {device_ids!r}")
        found = list(device_ids)
    if world_size is not None and world_size != len(found):
        raise ValueError(
            f"world_size is {world_size}, and JAX has {len(found)} devices: leave it out, pass as many device_ids, or "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={world_size} to try it on a CPU"
        )
    chosen = plan if isinstance(plan, KerasPlan) else rules_plan(model, len(found))
    chosen.validate(model, len(found))
    mesh = keras.distribution.DeviceMesh((1, len(found)), AXES, found)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map(chosen, mesh), batch_dim_name=AXES[0])
    _move(model.variables, distribution)
    return chosen, distribution


def _move(variables: Sequence[Any], distribution: Any) -> None:
    keras = backend.keras_module()
    for variable in variables:
        layout = distribution.get_variable_layout(variable)
        backend.move(variable, keras.distribution.distribute_tensor(backend.raw_value(variable), layout), layout)


def _move_compiled(model: Any, distribution: Any) -> None:
    """Move what a user made outside of the distribution's scope: the optimizer's numbers and those of metrics."""
    made = model.optimizer.variables if getattr(model, "optimizer", None) is not None else []
    _move([*made, *model.metrics_variables], distribution)


def _build(model: Any, moved: Moved) -> None:
    """Make the optimizer's slots, and cut those that are whole on every device by their first dimension, where the
    devices divide it."""
    optimizer, mesh = model.optimizer, moved.distribution.device_mesh
    if optimizer is None:
        return  # which fit refuses
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    for slot in optimizer.variables if moved.shard_optimizer_states else ():
        shape = tuple(slot.shape)
        if shape and shape[0] % mesh.shape[-1] == 0 and slot.value.sharding.is_fully_replicated:
            layout = backend.keras_module().distribution.TensorLayout((AXES[1], *[None] * (len(shape) - 1)), mesh)
            value = backend.keras_module().distribution.distribute_tensor(backend.raw_value(slot), layout)
            backend.move(slot, value, layout)
