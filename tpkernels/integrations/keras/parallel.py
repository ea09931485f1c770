"""``TensorParallel(model)``: a built Keras model, cut over the ranks in place, that trains, saves and loads as before.

It owns how a plan is carried out, and the class under which the model goes on: a subclass of
:class:`TensorParallel` and of the model's own.  Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpkernels.integrations.keras import backend, on_jax, optimizers
from tpkernels.integrations.keras.batches import compared
from tpkernels.integrations.keras.callbacks import prepared
from tpkernels.integrations.keras.clones import constructor, describe_whole
from tpkernels.integrations.keras.generation import generating
from tpkernels.integrations.keras.linears import linear
from tpkernels.integrations.keras.losses import sum_of_parts, whole_constraint, whole_regularizer
from tpkernels.integrations.keras.plan import KerasPlan, LayerPlan
from tpkernels.integrations.keras.planner import check_built, check_count, make_plan
from tpkernels.integrations.keras.refused import refuse_late
from tpkernels.integrations.keras.saved import (
    Parallel,
    by_methods,
    hub_files,
    loaded,
    part_files,
    plain,
    state_of,
    written,
)
from tpkernels.integrations.keras.shadow import equation_of, named_layers
from tpkernels.integrations.keras.start import (
    check_backend_name,
    check_devices,
    check_world_size,
    join,
    same_generators,
    same_variables,
)
from tpkernels.integrations.keras.tables import lookup
from tpkernels.integrations.keras.variables import Shards
from tpkernels.nn.digests import json_digest
from tpkernels.state.collective_errors import Ranks

__all__ = ["TensorParallel", "TensorParallelKeras"]

_SEED_STEP = 0x1E3779B1
"""Between the seeds of two ranks, where they drop different features."""


class TensorParallel:
    """The same model, cut over the ranks; it stays a ``keras.Model`` with its attributes and methods.

    ::

        model = tpk.keras.TensorParallel(model)     # on every rank, after it is built and before compile
        model.compile("adam", "mse")
        model.fit(x, y)

    Args:
        model: a built Keras model.  Weights, seeds and random generators of rank 0 are everybody's afterwards.
        world_size: the number of ranks, checked; default: all that run.
        device_ids: one name per rank, checked against what Keras computes on.
        distributed_backend: "auto", "gloo", "nccl", "torch" (what fits the devices) or "jax".
        plan: "auto", or a plan of :func:`make_plan`.
        shard_optimizer_states: also split the slots of variables that are whole on every rank.

    Raises:
        ValueError: on every rank, before anything changes; it says which argument, and what to do.
    """

    def __new__(
        cls,
        model: Any,
        world_size: int | None = None,
        device_ids: Sequence[str] | None = None,
        distributed_backend: str = "auto",
        *,
        plan: KerasPlan | str = "auto",
        shard_optimizer_states: bool = True,
    ) -> Any:
        def check() -> None:
            if isinstance(model, TensorParallel):
                raise ValueError("the model is parallel already, and a second time would cut its parts again")
            check_built(model)
            _check_uncompiled(model)
            if not (isinstance(plan, KerasPlan) or plan == "auto"):
                raise ValueError(f"plan must be 'auto' or a plan of make_plan, got {plan!r}")
            if not isinstance(shard_optimizer_states, bool):
                raise ValueError(f"shard_optimizer_states must be True or False, got {shard_optimizer_states!r}")
            check_backend_name(distributed_backend)
            if world_size is not None:
                check_count("world_size", world_size)

        if backend.keras_module().config.backend() != "torch":
            check()
            return on_jax.wrap(model, world_size, device_ids, plan, shard_optimizer_states, cls)
        pg = join(distributed_backend)

        def check_ranks() -> None:
            check()
            check_world_size(world_size)
            check_devices(device_ids, dist.get_world_size(pg))

        Ranks([pg]).step("TensorParallel", check_ranks)
        return _wrap(model, pg, plan, shard_optimizer_states)

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # the model is made already
        pass

    if TYPE_CHECKING:  # it is also an instance of the model's own class, for which types have no word

        def __getattr__(self, name: str) -> Any: ...

    @property
    def tensor_parallel_plan(self) -> KerasPlan:
        """What was cut, and why."""
        return state_of(self).plan

    # ------------------------------------------------------------------ training

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The ``compile`` of the model's own class."""
        state = state_of(self)
        call = inspect.signature(state.kind.compile).bind(self, *args, **kwargs)  # type: ignore[attr-defined]
        call.apply_defaults()
        if "optimizer" not in call.arguments:
            raise ValueError(
                f"compile of {state.kind.__name__} takes no optimizer: its own ones would update parts of variables as "
                "if they were whole"
            )
        optimizer = call.arguments["optimizer"]
        if state.shards.world_size > 1:
            optimizer = call.arguments["optimizer"] = optimizers.agreed(optimizer, state.shards.pg)
        state.kind.compile(*call.args, **call.kwargs)  # type: ignore[attr-defined]
        if optimizer is not None and state.shards.world_size > 1:
            made: Any = self.optimizer
            optimizers.check_optimizer(made)  # what "auto" of KerasHub's models has become, too
            optimizers.prepare(made, state.shards, slice_slots=state.shard_optimizer_states)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """The ``fit`` of the model's own class, from rank 0's random numbers."""
        same_generators(state_of(self).shards.pg)
        return self._with_callbacks("fit", args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_callbacks("evaluate", args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_callbacks("predict", args, kwargs)

    def _with_callbacks(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        state = state_of(self)
        method = getattr(state.kind, name)
        given = inspect.signature(method).bind(self, *args, **kwargs).arguments  # KerasHub's have another order
        prepared(given.get("callbacks", kwargs.get("callbacks")), self, state.shards)
        return method(self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        state.check_loaded()
        return state.kind.__call__(self, *args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        return _make_function(self, "train_function", force)

    def make_test_function(self, force: bool = False) -> Any:
        return _make_function(self, "test_function", force)

    def make_predict_function(self, force: bool = False) -> Any:
        return _make_function(self, "predict_function", force)

    def _initialize_ddp(self) -> None:
        """Keras 3.16 wraps models in DDP here, which would give all ranks the parts of rank 0."""

    def get_metrics_result(self) -> Any:
        return backend.base_metrics_result(self)

    # ------------------------------------------------------------------ state

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's ``save``, by every rank: whole variables, gathered one at a time, written by rank 0."""
        written(self, "save", filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's ``save_weights``, by every rank; rank 0 writes whole variables."""
        written(self, "save_weights", filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's ``load_weights``, by every rank, which reads its parts; on an error nothing changes on any rank."""
        state = state_of(self)
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.trainable_variables)
        variables = [*self.variables, *(optimizer.variables if optimizer is not None else ())]
        loaded(state, self, "load_weights", state.kind.load_weights, variables, filepath, *args, **kwargs)  # type: ignore[attr-defined]
        state.unloaded = False

    def export(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a model whose weights are cut cannot be exported: save it, and export what load_model gives")

    def get_config(self) -> Any:
        with plain(self) as kind:
            return kind.get_config(self)

    def to_json(self, **kwargs: Any) -> Any:
        with plain(self) as kind:
            return kind.to_json(self, **kwargs)

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """A model that is not parallel."""
        own = (base for base in cls.__mro__ if not issubclass(base, TensorParallel | on_jax.OnDevices))
        kind: Any = next(own)
        return kind.from_config(config, custom_objects=custom_objects)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Take whole weights, as ``get_weights`` gives them."""
        state_of(self).shards.set_weights(self, weights)
        state_of(self).unloaded = False

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Keras's ``summary``, with the numbers of the whole model."""
        state = state_of(self)
        with state.shards.whole_shapes():
            state.kind.summary(self, *args, **kwargs)  # type: ignore[attr-defined]

    def count_params(self) -> Any:
        state = state_of(self)
        with state.shards.whole_shapes():
            return state.kind.count_params(self)  # type: ignore[attr-defined]


TensorParallelKeras = TensorParallel


def _check_uncompiled(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise ValueError(
            f"{type(model).__name__} is compiled and its optimizer {optimizer.name!r} has state, for whole variables: "
            "save the weights, build the model, call TensorParallel, compile, and load_weights, which brings the "
            "optimizer's state along"
        )
    if optimizer is not None:
        optimizers.check_optimizer(optimizer)


def _wrap(model: Any, pg: dist.ProcessGroup, plan: KerasPlan | str, shard_optimizer_states: bool) -> Any:
    world_size = dist.get_world_size(pg)

    def look() -> tuple[KerasPlan, dict[str, Any]]:
        if isinstance(plan, KerasPlan):
            plan.validate(model, world_size)
        chosen = plan if isinstance(plan, KerasPlan) else make_plan(model, world_size)
        return chosen, {"digest": json_digest(chosen.to_json()), "shard_optimizer_states": shard_optimizer_states}

    chosen, said = Ranks([pg]).together("TensorParallel", look)
    for rank, one in enumerate(said):
        if one["digest"] != said[0]["digest"]:
            raise ValueError(f"ranks 0 and {rank} have different plans: pass the same one on every rank, or 'auto'")
        if one != said[0]:
            values = [facts["shard_optimizer_states"] for facts in said]
            raise ValueError(f"shard_optimizer_states differs between the ranks: {values}")
    same_variables(model.variables, pg)
    same_generators(pg)
    shards = Shards(pg)
    kind = type(model)
    unloaded = any(backend.raw_value(variable).is_meta for variable in model.variables)
    state = Parallel(kind, chosen, shards, shard_optimizer_states, unloaded)
    members = generating(model, chosen, shards) | hub_files(kind) | by_methods(kind) if world_size > 1 else {}
    if world_size > 1:
        _apply(model, chosen, shards)
    _take_off_meta(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    model.__class__ = type(kind.__name__, (TensorParallel, kind), names | members | constructor(kind))
    backend.bare(model, "tensor_parallel", state)
    if world_size > 1:
        describe_whole(model, chosen)
        part_files(model)
    backend.forget_functions(model)
    if getattr(model, "optimizer", None) is not None and world_size > 1:
        optimizers.prepare(model.optimizer, shards, slice_slots=shard_optimizer_states)
    return model


def _apply(model: Any, plan: KerasPlan, shards: Shards) -> None:
    layers = named_layers(model)
    equations = {name: equation_of(layer) for name, layer in layers.items()}
    variables = {variable.path: variable for variable in model.variables}
    for path, cut in plan.cuts.items():
        variable = variables[path]
        shards.cut(variable, cut)
        if variable.regularizer is not None:
            variable.regularizer = whole_regularizer(variable.regularizer, cut, shards)
        if variable.constraint is not None:
            variable.constraint = whole_constraint(variable.constraint, shards)
    for path in plan.summed:
        sum_of_parts(variables[path], shards)
    for entry in plan.layers:
        _replace_call(layers[entry.name], equations[entry.name], entry, shards)
    for numbers in plan.numbers:
        backend.bare(layers[numbers.name], numbers.attribute, numbers.ranks[shards.rank])
    for name in plan.random:
        generators = backend.seed_generators(layers[name])
        if not generators:
            raise ValueError(f"{name} draws random numbers for a part, and has no seed generator of its own")
        for generator in generators:
            backend.bare(generator, "next", _seed_of_rank(generator.next, shards.rank))
            backend.draw_from_state(generator)
    for name, layer in layers.items():
        if name:
            backend.bare(layer, "set_weights", partial(shards.set_weights, layer))
    refuse_late(layers.values())
    backend.retrack(backend.all_layers(model))


def _take_off_meta(model: Any) -> None:
    """Give what was built on the meta device memory, for a file's values, and random generators their first state."""
    layers = backend.all_layers(model)
    for layer in layers:
        for generator in backend.seed_generators(layer):
            if backend.off_meta(generator.state):
                backend.seed_anew(generator)
    if sum(map(backend.off_meta, model.variables)):
        backend.retrack(layers)


def _replace_call(layer: Any, equation: Any, entry: LayerPlan, shards: Shards) -> None:
    if entry.style == "whole":
        return
    if entry.style == "vocabulary":
        table = next(iter(entry.cuts.values()))
        backend.bare(layer, "call", lookup(layer, table, shards.rank, shards.pg))
        return
    layer.input_spec = None
    backend.bare(layer, "call", linear(layer, equation, entry, shards.rank, shards.pg))


def _seed_of_rank(draw: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def draw_of_rank(ordered: bool = True) -> Any:
        seed = draw(ordered)
        return seed + torch.tensor([0, rank * _SEED_STEP % (1 << 30)], dtype=seed.dtype, device=seed.device)

    return draw_of_rank


def _make_function(model: Any, name: str, force: bool) -> Any:
    """Keras's function for one batch, with the comparison of batches in front."""
    state = state_of(model)
    before = getattr(model, name)
    made = getattr(state.kind, f"make_{name}")(model, force)
    function = getattr(model, name)
    if function is not before and state.shards.world_size > 1:
        setattr(model, name, compared(function, state.shards.group))
    return made
