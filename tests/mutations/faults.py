"""Seeded faults of the planner and of the sums of parallel modules: each is a context manager for a rank process.

``FAULTS`` has, for every entry of :data:`tpkernels.planning.replays.rules.RULES`, one fault that lets it refuse
nothing, one for those that tell which whole tensors meet parts, and one that takes the layout for unchanged where a
rule moves it; faults of the replay, of the whole proof, and of what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tpkernels.nn import column, copied_heads, embedding, replicated, row, shared_input
from tpkernels.nn.row import RowParallelLinear
from tpkernels.planning import planner
from tpkernels.planning.proofs import decided_pairs, decision, search, whole_replays
from tpkernels.planning.replays import replay, rules, sequence_flow
from tpkernels.planning.runs import example_inputs, trace
from tpkernels.planning.runs.session import Session
from tpkernels.planning.runs.shadow import Mode
from tpkernels.planning.splits import Split, Unproven

__all__ = ["FAULTS", "Fault"]

Fault = Callable[[], AbstractContextManager[None]]
aten = torch.ops.aten


def _first(splits: Any) -> Split | None:
    for item in splits if isinstance(splits, list | tuple) else [splits]:
        found = item if isinstance(item, Split) else _first(item) if isinstance(item, list) else None
        if found is not None:
            return found
    return None


def _likely(call: rules.Call) -> list[Split | None]:
    """Every result as the argument is cut where it can be, and whole elsewhere."""
    split = _first(call.splits)
    assert split is not None

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) > split.dim and shape[split.dim] == sum(split.segments)

    return [split if fits(shape) else None for shape in call.outputs]


@contextmanager
def _careless(packet: Any, alone: bool = True) -> Iterator[None]:
    """Where the rule refuses, its result is taken for cut as its size on one rank suggests.

    ``alone``: the checks behind it stay, of scalars and of activations that meet parts.
    """
    original = replay.Replay._by_rule

    def by_rule(self: Any, rule: Any, event: Any, local: Any, splits: Any, arguments: Any) -> Any:
        try:
            return original(self, rule, event, local, splits, arguments)
        except Unproven:
            if event.packet != packet:
                raise
            if len(event.outputs) == 1:
                return None  # then the replay compares the sizes
            split = _first(splits)
            assert split is not None
            return [  # what was reduced to one element, as max and its place, is taken to be whole
                Split(split.dim, (shape[split.dim],)) if len(shape) > split.dim and shape[split.dim] > 1 else None
                for shape in event.outputs
            ]

    with _patched((replay.Replay, "_by_rule", by_rule)):
        if alone:
            yield
            return
        rest = ((replay.Replay, "_mixed", _plan_of_partial(True)), (replay, "same_scalars", lambda *both: True))
        with _patched(*rest):
            yield


def _silent(rule: Any) -> Any:
    """Does not tell of whole tensors that meet parts."""

    def mutated(call: rules.Call) -> Any:
        call.mix = lambda index: None
        return rule(call)

    return mutated


def _whole(rule: Any) -> Any:
    return lambda call: [None] * len(call.outputs)


def _unmoved(rule: Any) -> Any:
    return lambda call: _likely(call)


@contextmanager
def _with_rule(packet: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    with mock.patch.dict(rules.RULES, {packet: change(rules.RULES[packet])}):
        yield


@contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """``(owner, name, new)``, or a new made from the old by a function named ``make``."""
    started = [mock.patch.object(owner, name, new) for owner, name, new in patches]
    for patch in started:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(started):
            patch.stop()


def _plan_of_partial(kept: bool) -> Any:
    """``_mixed`` without its first or its second half."""

    def mixed(self: Any, tensor: Tensor) -> None:
        if not self.has_origin(tensor):
            return
        origin = self.origin(tensor)
        if origin is None:
            if not kept:
                raise Unproven("an activation that is whole meets parts")
            return
        if kept:
            self.partial |= origin
            for name in origin:
                self.partial_groups[name] = self.partial_groups.get(name, frozenset()) | self.blame

    return mixed


def _pointwise_of(*, tells: bool, checks: bool) -> Any:
    original = rules.pointwise

    def pointwise(shapes: Any, splits: Any, mix: Any) -> Any:
        if checks:
            return original(shapes, splits, mix if tells else lambda index: None)
        ndim = max(len(shape) for shape in shapes)
        first = next((shape, split) for shape, split in zip(shapes, splits, strict=True) if split is not None)
        for index, split in enumerate(splits):
            if split is None:
                mix(index)
        return first[1].at(ndim - len(first[0]) + first[1].dim)

    return pointwise


def _float_origins_only(self: Any, tensor: Tensor, origin: Any) -> None:
    """As the planner once had it: complex numbers lose where they come from."""
    if tensor.is_floating_point():
        self.origins[int(tensor.untyped_storage()._cdata)] = origin


def _outputs_unchecked(self: Any, args: Any, kwargs: Any) -> None:
    self._run(self.shadow.model, args, kwargs)


def _row_input_unchecked() -> Any:
    original = replay.Replay.layer_called

    def layer_called(self: Any, name: str, x: Tensor) -> Tensor:
        role, split = self.roles.get(name), self._splits.get(id(x))
        if role is None or role.kind != "row" or split is None or split == role.split(x.dim() - 1):
            return original(self, name, x)
        self._splits[id(x)] = role.split(x.dim() - 1)
        return original(self, name, x)

    return layer_called


def _whole_input_unchecked() -> Any:
    """A layer that takes the whole is given a part, and the part's size is not looked at either."""
    original = replay.Replay.layer_called

    def layer_called(self: Any, name: str, x: Tensor) -> Tensor:
        role, event = self.roles.get(name), self.recording.events[min(self._at, self._stop - 1)]
        if (role is None or role.kind != "row") and id(x) in self._splits and event.layer == name:
            whole = self.new_output(x, tuple(event.whole[0]), x.dtype)
            self.made[id(whole)] = self.source(x)
            return original(self, name, whole)
        return original(self, name, x)

    return layer_called


def _row_bias_on_every_rank() -> Any:
    original = RowParallelLinear.forward

    def forward(self: Any, x: Tensor, **options: Any) -> Tensor:
        y = original(self, x, **options)
        return y if self.bias is None else y + self.bias.to_local() * (self.mesh.size() - 1)

    return forward


def _no_sum_of_dx(x: Tensor, weight: Any, group: Any, *, bias: Any = None, **options: Any) -> Any:
    """A column without the all-reduce of the gradient of its input."""
    single = isinstance(weight, Tensor)
    weights = [weight] if single else list(weight)
    biases = [bias] if single else list(bias or [None] * len(weights))
    outs = [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    return outs[0] if single else outs


def _no_sum_of_partials(x: Tensor, weight: Tensor, group: Any, *, bias: Any = None, **options: Any) -> Tensor:
    """A row that does not sum."""
    return torch.nn.functional.linear(x, weight, bias)


def _own_part(x: Tensor, group: Any, *, dim: int, shard_sizes: Any) -> Tensor:
    rank = group.get_local_rank()
    return x.narrow(dim, sum(shard_sizes[:rank]), shard_sizes[rank])


def _rules() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for packet in rules.RULES:
        name = str(packet).rpartition(".")[2]
        if rules.RULES[packet] is rules._same or name in ("native_dropout", "log_sigmoid_forward"):
            found[f"{name} gives something whole"] = partial(_with_rule, packet, _whole)
        elif name not in _REFUSING_NOTHING | _ON_SPACE:
            if name in _GUARDED:
                found[f"{name} refuses nothing, nor does the rest"] = partial(_careless, packet, alone=False)
            else:
                found[f"{name} refuses nothing"] = partial(_careless, packet)
        if name in _MIXING:
            found[f"{name} does not tell what it mixes"] = partial(_with_rule, packet, _silent)
        if name in _MOVING:
            found[f"{name} is taken to move nothing"] = partial(_with_rule, packet, _unmoved)
    return found


_REFUSING_NOTHING = {"transpose", "t", "permute", "unsqueeze", "squeeze", "expand"}
_ON_SPACE = {name for names in rules._SPACE.values() for name in names} - {
    "max_pool2d_with_indices",
    "avg_pool2d",
} | {"im2col"}
"""Ops that share their one check with these two, and windows; an edit of such a line is a fault as well."""
_GUARDED = {"sum", "mean", "amax", "amin", "max", "min", "index", "gather", "var", "std", "var_mean", "logsumexp",
            "linalg_vector_norm", "mm", "addmm", "baddbmm", "native_layer_norm", "stack", "cat", "view", "repeat",
            "constant_pad_nd", "unfold"}  # fmt: skip
"""What these would let through is refused a second time, mostly because something whole then meets parts."""
_ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
              "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
              "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
_MIXING = {"native_layer_norm", "_fused_rms_norm", "rms_norm", "mm", "addmm", "bmm", "baddbmm", *_ATTENTION}
_MOVING = {"view", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split",
           "split_with_sizes", "unbind", "cat", "stack", "repeat", "repeat_interleave", "_unsafe_view"}  # fmt: skip


def _planner() -> dict[str, Fault]:
    return {
        "pointwise ops do not tell what they mix": lambda: _patched(
            (replay, "pointwise", _pointwise_of(tells=False, checks=True))
        ),
        "pointwise ops take any layout": lambda: _patched(
            (replay, "pointwise", _pointwise_of(tells=True, checks=False))
        ),
        "nothing is mixed": lambda: _patched((replay.Replay, "_mixed", lambda self, tensor: None)),
        "activations may be mixed": lambda: _patched((replay.Replay, "_mixed", _plan_of_partial(True))),
        "parameters are not partial": lambda: _patched((replay.Replay, "_mixed", _plan_of_partial(False))),
        "nothing is completed": lambda: _patched((replay.Replay, "_completed", lambda self, tensors: None)),
        "parameters may be partial and complete": lambda: _patched(
            (replay.Replay, "_check_gradients", lambda self: None)
        ),
        "only floating point has an origin": lambda: _patched((Session, "set_origin", _float_origins_only)),
        "origins are not passed on": lambda: _patched((Session, "pass_origins", lambda *args: None)),
        "parts may leave the model": lambda: _patched((replay.Replay, "run_model", _outputs_unchecked)),
        "custom backwards are trusted": lambda: _patched(
            (replay.Replay, "gradient_code_called", lambda self, name, tensors, made, works: None)
        ),
        "scalars may be one rank's": lambda: _patched((replay, "same_scalars", lambda whole, local: True)),
        "constants may be one rank's": lambda: _patched(
            (replay, "constant_of", lambda f, t: None), (trace, "constant_of", lambda f, t: None)
        ),
        "ops may take other tensors": lambda: _patched((Session, "sources_of", lambda self, packet, tensors: ())),
        "a row takes any layout": lambda: _patched((replay.Replay, "layer_called", _row_input_unchecked())),
        "a column takes a part": lambda: _patched((replay.Replay, "layer_called", _whole_input_unchecked())),
        "half of a module may be partial": lambda: _patched(
            *((module, "half_partial", lambda replay, modules: {}) for module in (decision, decided_pairs))
        ),
        "gradients of partial parameters are not planned": lambda: _patched(
            (decision._Decider, "run", _without_partial())
        ),
        "ranks of other sizes than the first are like it": lambda: _patched(
            *((module, "unlike_ranks", lambda roles, world_size: [0]) for module in (search, whole_replays))
        ),
        "runs are without gradients": lambda: _patched(
            (example_inputs, "MODES", (Mode(True, False), Mode(False, False)))
        ),
        "parts by features are cut along the sequence": lambda: _patched(
            (sequence_flow._Flow, "_has_all_features", lambda self, tensor, name: None)
        ),
        "modules do on a part of the sequence what they do on all": lambda: _patched(
            (sequence_flow, "check_on_a_part", lambda shadow, calls: None)
        ),
        "weights that are read may be cut": lambda: _patched((planner, "kept_layers", lambda *given, **options: {})),
        "tied weights are cut apart": lambda: _patched((planner._Planner, "_untie", lambda self: None),
                                                       (planner._Planner, "_tied", lambda self: {})),
    }  # fmt: skip


def _without_partial() -> Any:
    original = decision._Decider.run

    def run(self: Any, widest: Any) -> Any:
        decision = original(self, widest)
        decision.partial = set()
        return decision

    return run


def _running() -> dict[str, Fault]:
    return {
        "gradients of replicated parameters are not summed": lambda: _patched(
            (replicated, "copy_to_group", lambda x, group: x)
        ),
        "a row's bias is added by every rank": lambda: _patched(
            (RowParallelLinear, "forward", _row_bias_on_every_rank())
        ),
        "a row does not sum": lambda: _patched((row, "matmul_all_reduce", _no_sum_of_partials)),
        "a column's input gradient is not summed": lambda: _patched(
            (shared_input, "copy_matmul", _no_sum_of_dx), (column, "copy_matmul", _no_sum_of_dx)
        ),
        "a split input's gradient is not gathered": lambda: _patched((row, "shard", _own_part)),
        "copies of heads do not sum their gradients": lambda: _patched(
            (copied_heads, "copy_to_group", lambda x, group: x)
        ),
        "an embedding does not sum": lambda: _patched((embedding, "all_reduce", lambda x, group, **options: x)),
    }


FAULTS: dict[str, Fault] = {**_rules(), **_planner(), **_running()}
