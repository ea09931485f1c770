"""Run a model, or a part of it, as one rank would after a swap, and prove that it computes its part of the whole.

Owns: :class:`Replay`.  It runs the Python code of the model on fake tensors of one rank's sizes, next to the recording
of the whole model: the same ops must run in the same order, and for each the rules say how its result is cut.

What is proven: every value a rank computes is its part of the whole's value (or all of it), every parameter's gradient
is complete or known to be a sum over the ranks, and nothing cut leaves the model.  Everything else raises
:class:`Unproven`.  A whole activation that meets a part raises, because its gradient would be incomplete; a whole
parameter that does has its gradients summed.

What the run does not show proves nothing.  A ``torch.autograd.Function`` of the model's own has a backward that is not
seen.  Where nothing is proven of an op, its results must not be read.  Numbers that Python makes from sizes are
compared between the two runs, and so is which tensor each op takes.
Ranks whose number of heads differs from the first rank's have a replay of their own (:func:`unlike_ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tpkernels.ops.checks import DTYPES
from tpkernels.planning.replays.constant_parts import COPIES, ConstantParts
from tpkernels.planning.replays.gradients import OWN_NUMBERS
from tpkernels.planning.replays.op_call import NO_PARTS, is_pointwise, no_part
from tpkernels.planning.replays.roles import Role, unlike_ranks
from tpkernels.planning.replays.rules import RULES, Call, pointwise
from tpkernels.planning.runs.events import TRANSPARENT, Event, Shape, as_shapes, canonical, constant_of, is_random
from tpkernels.planning.runs.example_calls import Example
from tpkernels.planning.runs.op_arguments import (
    INDEXED,
    has_masks,
    memory_of,
    numbers_in,
    same_scalars,
    shapes_in,
    without_sizes,
)
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.tensors import tensors_in
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import NUMBERED, Split, Unproven, divisor, how, part_of_constant, raised

__all__ = ["Replay", "Role", "unlike_ranks"]

aten = torch.ops.aten
_CONSTANT = {aten.zeros, aten.ones, aten.full, aten.new_zeros, aten.new_ones, aten.new_full, aten.empty, aten.new_empty}
_READING = {aten.select, aten._local_scalar_dense}
"""Of a tensor of numbers, to which code gives one back."""
_MOST_NUMBERS = 16
"""In such a tensor."""


class Replay(ConstantParts):
    """The run of ``rank`` next to ``recording``; ``attributes`` have a value for each rank.

    After a run: ``partial`` names parameters whose gradient each rank has a part of, ``units`` the features of each
    column layer that stay together.
    """

    def __init__(
        self,
        shadow: Shadow,
        recording: Recording,
        roles: Mapping[str, Role],
        attributes: Mapping[tuple[str, str], tuple[int, ...]],
        world_size: int,
        rank: int,
    ) -> None:
        super().__init__(shadow, recording, {key: values[rank] for key, values in attributes.items()}, roles)
        self.world_size, self.rank = world_size, rank
        self.guess = shadow.guess = recording.guess
        self.dice = recording.dice
        self.paths, self.turns, self.alike = recording.paths, recording.turns, recording.alike.copy()
        self.origins = dict(recording.origins)
        self.values.take(recording.values)
        self.heads: dict[int, int] = {}
        """The largest number of pieces, of heads, that a group's features were viewed as."""
        self.may_leave: frozenset[int] = frozenset()
        """Groups of whose parts the model may return some."""
        self.cut_results: dict[tuple[int, int, int], Tensor] = {}
        self._open_groups: set[int] = set()
        self._open_pairs: set[int] = set()
        """Groups between whose layers the run is: of linear layers, and those that a convolution has begun."""
        self._drawn: dict[bool, set[int]] = {False: set(), True: set()}
        """Groups between whose layers random numbers were drawn for whole tensors, and for parts."""
        self._open_at_entry: dict[str, set[int]] = {}
        """By module: the groups between whose layers it was called last."""
        self._begin(0, len(recording.events))
        for name, role in roles.items():
            if role.kind in ("slice", "product"):
                self._slice(name, role)

    def _begin(self, start: int, stop: int) -> None:
        """Stand before event ``start``, as the recording did."""
        self._at, self._stop, self.made = start, stop, self.recording.made_before(start)
        self.made |= {id(part): self.source(self.shadow.own(name)) for name, part in self.slices.items()}

    def _slice(self, name: str, role: Role) -> None:
        """Let the run see this rank's part of a parameter."""
        whole, split = self.shadow.own(name), role.split(role.dim)
        part = self.shadow.sliced(name, split.local_shape(whole.shape, self.world_size, self.rank))
        self.slices[name] = part
        self.made[id(part)] = self.source(whole)
        self._mark(part, split, frozenset([role.group]))

    def came_from(self, tensor: Tensor) -> frozenset[str]:
        return self.recording.layers_behind(self.source(tensor))

    def run_scope(self, scope: Scope) -> None:
        """Run one module on the arguments that the recording saw."""
        self._begin(scope.start, scope.stop)
        self.host_begins = scope.host or self.recording.host_began
        self.begins, self.decided_before = self.recording.state_after(scope.changes), scope.decided
        self._run(self.shadow.modules[scope.name], *self.shadow.copied((scope.args, scope.kwargs)))

    def run_model(self, call: Example) -> None:
        """Run the whole model; nothing that is cut may be part of what it returns, but of groups that may leave."""
        self.begins = self.recording.begins | self._found
        out = self._run(call.run, (self.shadow.model,), {})
        self.cut_results = {} if call.method else self._leaving(tree_leaves(out))
        gathered = {id(tensor) for tensor in self.cut_results.values()}
        for tensor in tensors_in(out):
            if id(tensor) not in gathered:
                self._is_whole(tensor, "among the model's outputs")
            if self.has_origin(tensor):
                self._complete |= self.origin(tensor) or set()
        self._check_left()
        self._check_gradients()

    def _leaving(self, results: list[Any]) -> dict[tuple[int, int, int], Tensor]:
        """Parts that a parallel model gathers: the number of each result, the dimension and its size in the whole."""
        found = {}
        for number, one in enumerate(results):
            split, groups = self._splits.get(id(one)), self._groups.get(id(one), frozenset[int]())
            if split is None or split != Split(split.dim, split.segments[:1]) or one.dtype not in DTYPES:
                continue
            if groups and groups <= self.may_leave and id(one) not in self._summed:
                found[number, split.dim, split.segments[0]] = one
        return found

    def _run(self, module: Any, args: Any, kwargs: Any) -> Any:
        try:
            with self.shadow.running(self):
                out = module(*args, **kwargs)
        except Unproven:
            raise
        except Exception as error:
            raise self._as_unproven(error) from error
        if self._at != self._stop:
            raise Unproven("with one rank's sizes the model runs fewer ops")
        self._check_held()
        self._check_gradients()
        return out

    def _as_unproven(self, error: Exception) -> Unproven:
        """What it means that the model's code raises, and what met parts where ``einsum`` did."""
        told = raised(error)
        told.parameters = self._whole_parameters(self.refused)
        met = {split for tensor in self.refused if (split := self._splits.get(id(tensor))) is not None}
        told.met = met.pop() if len(met) == 1 else None
        return told

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if (moved := self.moved(func, args, kwargs, tensors)) is not None:
            return moved
        packet = canonical(func)
        self.not_from_before([one for one in tensors if packet not in _READING or id(one) not in self._own_numbers])
        groups = frozenset().union(*(self._groups.get(id(tensor), frozenset()) for tensor in tensors))
        self.blame = groups or self.blame
        if packet in TRANSPARENT:
            out = func(*args, **kwargs)
            self._mark(out, self._splits.get(id(tensors[0])), groups)
            self._pass_summed(func, tensors, [out])
            self.pass_origins(func, tensors, [out])
            self.made[id(out)] = self.source(tensors[0])
            return out
        event = self._next(packet, None, self.sources_of(packet, tensors))
        own = event.constant != constant_of(func, tensors)
        if own and (tensors[0].is_floating_point() or tensors[0].numel() > _MOST_NUMBERS):
            raise Unproven(OWN_NUMBERS)
        local, local_kwargs = as_shapes(args), {key: as_shapes(value) for key, value in kwargs.items()}
        local_kwargs |= memory_of(packet, tensors)
        self.before_written(func, args, kwargs)
        self.before_met(func, tensors)
        splits = [self._splits_of(argument) for argument in args]
        self._check_random(func, args, tensors)
        try:
            answers = self._answers(func, event, (local, local_kwargs), splits, (args, kwargs))
        except Unproven as error:
            error.parameters, error.states = self._whole_parameters(tensors), self.states_behind(tensors)
            raise
        out = self._run_op(func, args, kwargs, tensors)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if len(outputs) != len(event.outputs):
            raise Unproven(f"{packet} has {len(outputs)} results, {len(event.outputs)} in the whole model")
        if answers is None:
            answers = [self._constant(Shape(outputs[0].shape), event.outputs[0])]
            self.constant_made(packet, outputs[0])
        for output, shape, answer in zip(outputs, event.outputs, answers, strict=True):
            expected = shape if answer is None else answer.local_shape(shape, self.world_size, self.rank)
            if answer not in NO_PARTS and tuple(output.shape) != tuple(expected):
                raise Unproven(f"{packet} gives {list(output.shape)} where one rank's part is {list(expected)}")
            if func._schema.is_mutable and any(output is part for part in self.slices.values()):
                raise Unproven(f"{packet} writes to a parameter or buffer of which a rank has a part")
            if answer is None and func._schema.is_mutable and id(output) in self._splits:
                raise Unproven(f"{packet} writes something whole over a part")
            if answer is not None and func._schema.is_mutable and self._splits.get(id(output), answer) != answer:
                raise Unproven(f"{packet} writes a part in another layout")
            if answer is not None and func._schema.is_mutable and id(output) not in self._splits:
                raise Unproven(f"{packet} writes a part over something whole")
            if answer is not None and answer.is_whole:
                self._share(output, func, groups)
            else:
                self._mark(output, answer, groups)
        if own or any(id(tensor) in self._own_numbers for tensor in tensors):
            self._own_numbers |= {id(output): output for output in outputs}
        self._pass_summed(func, tensors, outputs)
        self.pass_origins(func, tensors, outputs)
        self._made(outputs)
        return out

    def _run_op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            told = raised(error)
            told.parameters, told.states = self._whole_parameters(tensors), self.states_behind(tensors)
            raise told from error

    def _check_random(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """Check random ops: between a column and its row ranks draw different numbers for parts, if there are any, or
        the same for whole tensors, and the same everywhere else."""
        if not is_random(func, args):
            return
        of_parts = any(id(tensor) in self._splits for tensor in tensors)
        pairs = self._open_pairs & self.blame if of_parts else self._open_pairs
        module = self.inside[-1] if self.inside else ""
        if of_parts and not self._open and (not pairs or module in self.shadow.around):
            raise Unproven(f"{canonical(func)} draws random numbers for something outside of the group")
        if any(id(tensor) in self._summed for tensor in tensors):
            raise Unproven(f"{canonical(func)} draws random numbers for what every rank has a share of the gradient of")
        if of_parts:
            self._part_draws.add(module)
            self.part_draws_in |= self._open_groups | pairs
        if not of_parts and self._between_layers(module):
            self.whole_draws[module] = self.whole_draws.get(module, frozenset()) | self._open_groups
        else:
            self._drawn[of_parts] |= self._open_groups | pairs
        both = self._drawn[True] & self._drawn[False]
        if module in self._part_draws:
            both |= self.whole_draws.get(module, frozenset())
        if both:
            self.blame = frozenset(both)
            raise Unproven(f"{canonical(func)} draws random numbers for whole tensors and parts between layers of it")
        if any(split.copied for split in map(self._splits_of, tensors) if split is not None):
            raise Unproven(f"{canonical(func)} draws random numbers for what every rank has a copy of")

    def _between_layers(self, module: str) -> bool:
        """Whether a module is called between layers of one group, so that it can draw what all ranks share."""
        inside = any(name.startswith(f"{module}.") or name == module for name in self.roles)
        return len(self._open_groups) == 1 and self._open_at_entry.get(module) == self._open_groups and not inside

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        super().entered(name, args, kwargs)
        self._open_at_entry[name] = {*self._open_groups}

    def left(self, name: str, output: Any = None) -> Any:
        given = super().left(name, output)
        if name in self.whole_draws and self._open_at_entry[name] != self._open_groups:
            raise Unproven(f"{name} draws random numbers for whole tensors, and calls layers between which parts are")
        return given

    def _answers(
        self, func: Any, event: Event, local: Any, splits: list[Any], arguments: Any
    ) -> list[Split | None] | None:
        """How the results are cut; None for a constant, for which its shape suffices."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        both = ((event.whole, event.kwargs), local)
        if not same_scalars(*(without_sizes(event.packet, *arguments) for arguments in both)):
            raise Unproven(f"an argument of {event.packet} depends on the number of features of one rank")
        if not any(id(tensor) in self._splits for tensor in tensors):
            if (event.whole, event.kwargs) == local:
                self._completed(tensors)
                return [None] * len(event.outputs)
            if event.packet in _CONSTANT:
                return None
            if event.packet in COPIES and event.whole[0] == local[0][0]:  # once for each head that a rank has
                self._mixed(tensors[0])
                return None
            if event.packet is aten.arange and len(event.whole) == 1:
                return [NUMBERED]
            raise Unproven(f"{event.packet} depends on the number of features of one rank")
        cuts = [self._splits.get(id(tensor)) for tensor in tensors]
        if (answer := no_part(func, event.packet, cuts, event.outputs)) is not None:
            return [answer] * len(event.outputs)
        if event.packet in _CONSTANT:  # x.new_zeros(...): the numbers in it are not x's
            return None
        if (rule := RULES.get(event.packet)) is not None:
            return self._by_rule(rule, event, local, splits, arguments)
        if not is_pointwise(func):
            raise Unproven(f"no rule says what {event.packet} does to parts")
        shapes = shapes_in((event.whole, event.kwargs))
        return [pointwise(shapes, cuts, lambda index: self._mixed(tensors[index]))] * len(event.outputs)

    def _by_rule(self, rule: Any, event: Event, local: Any, splits: list[Any], arguments: Any) -> list[Split | None]:
        args, kwargs = arguments
        mask = kwargs.get("attn_mask")
        named = dict(event.kwargs)
        if isinstance(mask, Tensor):
            named["attn_mask split"] = self._splits.get(id(mask))
        if event.packet is aten.index:
            named["indices"] = numbers_in(args[1])
        if event.packet in INDEXED:
            named["masks"] = has_masks(args[1])
        if event.packet is aten.gather:
            sizes = zip(event.whole[2], local[0][2], strict=True)
            named["index is alike along"] = {
                dim for dim, (whole, part) in enumerate(sizes) if whole != part and id(args[2]) in self._constants
            }

        def mix(index: int) -> None:
            tensor = mask if index < 0 else args[index]
            if isinstance(tensor, Tensor):
                self._mixed(tensor)

        call = Call(event.whole, local[0], (named, local[1]), splits, event.outputs, self.world_size, self.rank, mix)
        try:
            answer = rule(call)
        except Unproven as error:
            told = Unproven(f"{event.packet}: {error.reason}", count=error.count)
            told.layers, told.met, told.segmented = error.layers, error.met, error.segmented
            raise told from None
        answers: list[Split | None] = answer if isinstance(answer, list) else [answer] * len(event.outputs)
        first = answers[0]
        if event.packet is aten.view and first is not None and first.dim < len(event.outputs[0]) - 1:
            if len(event.outputs[0]) > len(event.whole[0]):  # features are seen as heads
                for group in self.blame:
                    self.heads[group] = max(self.heads.get(group, 0), *first.segments)
        return answers

    def _constant(self, local: Shape, whole: Shape) -> Split | None:
        """A tensor of one value is a part of a larger one of that value."""
        pieces = sorted({role.pieces for role in self.roles.values() if role.pieces})
        packed = [role.split(0) for role in self.roles.values() if role.copied]
        return part_of_constant(local, whole, pieces, packed, self.world_size, self.rank)

    def norm_called(self, name: str, forward: Any, *given: Tensor) -> Any:
        """A norm over features that are cut is one step; any other call of it runs its code."""
        self.not_from_before([*given])
        x, call = given[0], self.recording.norm_calls.get(self._at)
        split, norm = self._splits.get(id(x)), self.shadow.norms.get(name)
        if split is None or split.dim != (x.dim() - 1 if norm is None else norm.dim_in(x.shape)):
            self._whole_norms.add(name)
            return forward(*given)
        features = self.shadow.model.get_parameter(f"{name}.weight").shape[-1]
        known = call is not None and call.name == name and norm is not None and (x.dim() == 4 or not norm.response)
        cut = {self._splits.get(id(one)) for one in given} == {Split(split.dim, (features,))}
        if not known or not cut or features % divisor(self.world_size):
            return forward(*given)
        assert call is not None
        if call.sources != tuple(map(self.source, given)) or call.stop > self._stop:
            raise Unproven(f"with one rank's sizes {name} takes another tensor")
        groups = self.blame = self._groups.get(id(x), self.blame)
        self._at = call.stop
        out = self.new_output(x, split.local_shape(call.shape, self.world_size, self.rank), x.dtype)
        self.made[id(out)] = call.result
        self._mark(out, split, groups)
        self.cut_norms[name] = groups
        return out

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        x = self.taken_by(name, x)
        self.not_from_before([x])
        self.blame = self._groups.get(id(x), self.blame)
        if any(key.rpartition(".")[0] == name for key in self.slices):
            raise Unproven(f"{name} is called, and has a parameter that is read and cut by itself")
        event, role = self._next(None, name, (self.source(x),)), self.roles.get(name)
        split, whole_in, whole_out = self._splits.get(id(x)), event.whole[0], event.outputs[0]
        last = len(whole_in) - 1
        taken = role if role is not None and role.kind == "row" else None if role is None else role.taken
        if taken is not None:
            self.blame = frozenset([taken.group])
            if split != taken.split(last):
                raise Unproven.of_input(name, split, last, "features in one piece")
            if role is not None and role.group != taken.group:  # it ends one group, and begins another
                self._open = False
                self._open_groups.discard(taken.group)
                self._open_pairs.discard(taken.group)
        if role is not None and role.kind == "row":
            shape, answer = tuple(whole_out), None
            self._open = False
            self._open_groups.discard(role.group)
            self._open_pairs.discard(role.group)
        else:
            if taken is None:
                if split is not None:
                    raise Unproven(f"the input of {name} is {how(split)}, which takes it whole")
                if tuple(x.shape) != tuple(whole_in):
                    raise Unproven(f"the input of {name} has shape {list(x.shape)} instead of {list(whole_in)}")
                self._feeds(name, id(x) in self._summed)
            answer = role.split(len(whole_out) - 1) if role is not None and role.kind == "column" else None
            shape = tuple(whole_out) if answer is None else answer.local_shape(whole_out, self.world_size, self.rank)
            if role is not None and answer is not None:
                self._open = True
                self._open_groups.add(role.group)
        if self.has_origin(x) and id(x) not in self._summed:
            self._complete |= self.origin(x) or set()
        out = self.new_output(x, shape, self.layer_dtype(name, x))
        self._mark(out, answer, frozenset() if role is None or answer is None else frozenset([role.group]))
        if role is not None and (role.kind == "feeder" or role.summed):
            self._summed.add(id(out))
            self._groups[id(out)] = frozenset([role.group])
        if role is not None and role.kind == "table":  # the gradient of its weight is a sum, not that of its output
            self.set_origin(out, self.origin(self.shadow.modules[name].weight))
            self._groups[id(out)] = frozenset([role.group])
        self._made([out])
        return out

    def _splits_of(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._splits.get(id(argument))
        if isinstance(argument, list | tuple):
            return [self._splits_of(item) for item in argument]
        return None
