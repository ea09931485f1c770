"""Where a sequence-sharded residual can travel: between blocks, through norms and sums, into the layers of groups.

It owns the proof, on the recorded inputs of the whole model.  The residual is a DTensor, so the model's own code keeps
seeing whole shapes and runs as the whole model does.  The proof only has to follow what is cut where: outside of norms
and the like, nothing but elementwise ops and reshapes may touch the residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels.planning.replays.local_modules import LocalCall, Step, check_on_a_part
from tpkernels.planning.replays.rules import RULES, Call, pointwise
from tpkernels.planning.runs.conditions import Rest
from tpkernels.planning.runs.events import Shape, as_shapes, canonical, constant_of, is_random
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.gradient_code import Works
from tpkernels.planning.runs.session import Session
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.tensors import storage_of, tensors_in
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import Split, Unproven

__all__ = ["Stream", "follow"]

aten = torch.ops.aten
_COPIES = {aten._to_copy, aten.clone, aten.detach, aten.alias, aten.view}
_DROPOUT = {aten.native_dropout, aten.bernoulli_, aten.bernoulli, aten.empty_like, aten.zeros_like, aten.ones_like}


@dataclass
class Stream:
    """What a residual that is cut along the sequence meets."""

    blocks: list[str]
    """In the order of their calls; the last one of each list of blocks gives the whole residual back."""
    whole: list[str] = field(default_factory=list)
    """Modules inside that take and give it whole."""
    local: list[str] = field(default_factory=list)
    """Modules inside that work on each rank's part as they would on all."""
    layers: dict[str, bool] = field(default_factory=dict)
    """Columns and rows of groups: whether they take, or give, a part of the sequence."""
    random: bool = False
    gathered_bytes: int = 0
    """Of whole tensors made from parts of the residual, or of its gradient, in one pass forward and backward."""
    notes: list[str] = field(default_factory=list)

    def same(self, other: Stream) -> bool:
        """Whether the same modules are met, in the same way."""
        mine, others = (
            (stream.blocks, set(stream.whole), set(stream.local), stream.layers) for stream in (self, other)
        )
        return mine == others


def follow(observation: Observation, roles: Mapping[str, str], others: Mapping[str, tuple[str, ...]]) -> Stream:
    """Follow the residual through all lists of blocks.

    Args:
        roles: "column", "row" or "both" for layers of proven groups.
        others: every other layer, with the layers that it would have been cut with: what is between them takes the
            whole sequence.
    """
    assert observation.shadow is not None and observation.recording is not None
    stacks = _stacks(observation.shadow.model, observation.recording)
    notes: list[str] = []
    while stacks:
        flows: list[_Flow] = []
        try:
            for mode, recording in observation.examples[0]:
                observation.shadow.set_mode(mode)
                flows.append(_Flow(observation.shadow, stacks, roles, others))
                flows[-1].begins, flows[-1].paths = recording.begins, recording.paths
                flows[-1].turns, flows[-1].alike = recording.turns, recording.alike.copy()
                flows[-1].dice = recording.dice
                flows[-1].run(observation.args, observation.kwargs)
                if not flows[0].stream.same(flows[-1].stream):
                    raise Unproven(f"it takes another path in {mode} than in {observation.mode}")
        except Unproven as error:
            name = flows[-1].stack or next(iter(stacks))
            notes.append(f"the residual of {name} is not cut along the sequence: {error.reason}")
            del stacks[name]
            continue
        finally:
            observation.shadow.set_mode(observation.mode)
        stream = flows[0].stream
        stream.notes = notes
        return stream
    return Stream([], notes=notes or ["there is no list of blocks whose residual could be cut along the sequence"])


def _stacks(model: nn.Module, recording: Recording) -> dict[str, list[str]]:
    """Lists of blocks that hand a tensor ``[batch, sequence, features]`` on, each called once, in order."""
    calls: dict[str, list[Any]] = {}
    for scope in recording.scopes:
        calls.setdefault(scope.name, []).append(scope)
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
            continue
        children = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
        if any(len(calls.get(child, [])) != 1 for child in children):
            continue
        inputs = [_residual_of(calls[child][0].args, calls[child][0].kwargs) for child in children]
        shapes = {None if x is None else tuple(x.shape) for x in inputs}
        starts = [calls[child][0].start for child in children]
        if len(shapes) != 1 or None in shapes or starts != sorted(starts):
            continue
        (shape,) = shapes
        nested = any(name.startswith(f"{child}.") for other in found.values() for child in other)
        if shape is not None and len(shape) == 3 and not nested and any(True for _ in module.parameters()):
            found[name] = children
    return found


def _residual_of(args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a block works on: its first argument, or what transformers calls ``hidden_states``."""
    x = args[0] if args else kwargs.get("hidden_states")
    return x if isinstance(x, Tensor) and x.is_floating_point() else None


class _Flow(Session):
    def __init__(
        self,
        shadow: Shadow,
        stacks: Mapping[str, list[str]],
        roles: Mapping[str, str],
        others: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__(shadow, {})
        self.roles, self.stacks = roles, stacks
        self.first = {blocks[0]: name for name, blocks in stacks.items()}
        self.last = {blocks[-1]: name for name, blocks in stacks.items()}
        self.blocks = {block for blocks in stacks.values() for block in blocks}
        self.whole = {
            self._around([name for name in members if name.startswith(f"{block}.")])
            for layer, members in others.items()
            for block in self.blocks
            if layer.startswith(f"{block}.")
        }
        self.whole |= {name for name in shadow.opaque if any(f"{name}.".startswith(f"{b}.") for b in self.blocks)}
        self.stream = Stream([block for blocks in stacks.values() for block in blocks])
        self.stack: str | None = None
        self._splits: dict[int, Split] = {}
        self._features: set[int] = set()
        """Storages of what columns give, and of what is made of it: parts by features, which no sequence cuts again."""
        self._suspended: list[tuple[dict[int, Split], bool]] = []
        """Outside of each module that takes everything whole: what was cut, and whether it took any of that."""
        self._local: LocalCall | None = None
        """The call of a module that works on the part, while it runs."""
        self._local_calls: list[LocalCall] = []
        self._shape: tuple[int, ...] = ()
        self._begins_with = 0
        """What the first block of the list takes, which is whole to all code outside of the blocks.  What the others
        take stays a part to code that has collected it."""
        self._inputs: set[int] = set()
        """Of the model, which need no gradient."""

    def _around(self, names: list[str]) -> str:
        """The innermost module around the layers of one block; a layer alone is its own."""
        common = names[0]
        while common and not all(name == common or name.startswith(f"{common}.") for name in names):
            common = common.rpartition(".")[0]
        while isinstance(self.shadow.modules[common], nn.ModuleList | nn.ModuleDict):
            common = common.rpartition(".")[0]
        return common

    def run(self, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.set_origin(leaf, None)
                self._inputs.add(id(leaf))
        with self.shadow.running(self):
            self.shadow.model(*args, **kwargs)
        check_on_a_part(self.shadow, self._local_calls, self.state_after())

    # ------------------------------------------------------------------ modules

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        if name in self.blocks:
            x = _residual_of(args, kwargs)
            if x is None:
                raise Unproven(f"{name} takes no residual")
            self._has_all_features(x, name)
            self.stack = self.first.get(name, self.stack)
            if id(x) not in self._splits:
                if name not in self.first:
                    raise Unproven(f"between blocks the residual becomes whole before {name}")
                self._shape, self._begins_with = tuple(x.shape), id(x)
                self._splits[id(x)] = self._sequence()
                if id(x) not in self._inputs:
                    self._gathers(x)  # its gradient
        if name in self.whole or (name in self.blocks and name in self.whole):
            self._suspend(tensors_in((args, kwargs)))
        elif self._is_local(name, (args, kwargs)):
            args, kwargs = self.shadow.copied((args, kwargs))
            self.kept.append((args, kwargs))
            given = [id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._local = LocalCall(name, args, kwargs, {i: self._splits[i] for i in given if i in self._splits})

    def left(self, name: str, output: Any = None) -> None:
        if name in self.whole and self._suspended:
            self._resume(name, output)
            self._note(self.stream.whole, name)
        if self._local is not None and self._local.name == name:
            call, self._local = self._local, None
            call.gives = [Shape(tensor.shape) for tensor in tensors_in(output)]
            self._local_calls.append(call)
            self._note(self.stream.local, name)
            if any(self._splits.get(id(tensor)) != call.cut for tensor in tensors_in(output)):
                raise Unproven(f"{name} gives something that is whole, or cut in another dimension than what it takes")
        if name in self.last:
            tensors = tensors_in(output)
            if not tensors or self._splits.pop(id(tensors[0]), None) != self._sequence():
                raise Unproven(f"{name} does not give the residual cut along the sequence")
            if any(id(tensor) in self._splits for tensor in tensors):
                raise Unproven(f"{name} gives more than the residual cut along the sequence")
            self._gathers(tensors[0])
            self._splits.pop(self._begins_with, None)
            self.stack = None

    def _is_local(self, name: str, given: Any) -> bool:
        """Whether the module may work on a part as it would on all."""
        module = self.shadow.modules[name]
        cut = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and id(leaf) in self._splits]
        if not cut or self._local is not None or name in self.blocks:
            return False
        prefix = f"{name}."
        layers = any(inner.startswith(prefix) for inner in (*self.shadow.layers, *self.whole))
        own = any(True for _ in module.parameters())
        return not layers and (own or isinstance(module, nn.Dropout))

    def _suspend(self, tensors: list[Tensor]) -> None:
        """Suspend the proof inside a module that takes everything whole."""
        before = dict(self._splits)
        cut = [tensor for tensor in tensors if self._splits.pop(id(tensor), None) is not None]
        for tensor in cut:
            self._gathers(tensor)
        self._suspended.append((before, bool(cut)))

    def _resume(self, name: str, output: Any) -> None:
        self._splits, took = self._suspended.pop()
        for tensor in tensors_in(output)[:1] if took else ():
            self._has_all_features(tensor, name)
            if tuple(tensor.shape[:2]) != self._shape[:2]:
                raise Unproven(f"what a module that is whole gives, {list(tensor.shape)}, is not along the sequence")
            self._splits[id(tensor)] = self._sequence()
            self._gathers(tensor)  # its gradient

    def _has_all_features(self, tensor: Tensor, name: str) -> None:
        if storage_of(tensor) in self._features:
            raise Unproven(f"{name} works between a column and its row, on a part of the features")

    def _gathers(self, tensor: Tensor) -> None:
        self.stream.gathered_bytes += tensor.numel() * tensor.element_size()

    def _sequence(self) -> Split:
        return Split(1, (self._shape[1],))

    @staticmethod
    def _note(names: list[str], name: str) -> None:
        if name not in names:
            names.append(name)

    # ------------------------------------------------------------------ layers and ops

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        layer, role, split = self.shadow.layers[name], self.roles.get(name), self._splits.get(id(x))
        shape = (*x.shape, layer.out_features) if layer.kind == "embedding" else (*x.shape[:-1], layer.out_features)
        out = self.new_output(x, shape, self.layer_dtype(name, x))
        if name in self.whole:
            if split is not None:
                self._note(self.stream.whole, name)
                self._splits[id(out)] = split
                self._gathers(x)
                self._gathers(out)  # its gradient
            return out
        if role == "column":
            self._agree(name, split is not None)
            self._features.add(storage_of(out))
        elif role == "row":
            inside = self.stack is not None and not self._suspended
            if split is not None:
                raise Unproven(f"{name} takes a part of the sequence after no column")
            self._agree(name, inside)
            if inside:
                self._splits[id(out)] = self._sequence_of(shape)
        elif split is not None:
            raise Unproven(f"{name} takes a part of the sequence, but is cut by itself")
        elif role == "both":
            self._features.add(storage_of(out))
        return out

    def _sequence_of(self, shape: tuple[int, ...]) -> Split:
        """How rows ``[batch, sequence, ...]`` or ``[batch * sequence, ...]`` are cut."""
        batch, length = self._shape[:2]
        if tuple(shape[:2]) == (batch, length) and len(shape) == 3:
            return self._sequence()
        if shape[0] == batch * length and len(shape) == 2:
            return Split(0, (length,) * batch)
        raise Unproven(f"rows of {list(shape)} are not along the sequence of {list(self._shape)}")

    def _agree(self, name: str, cut: bool) -> None:
        if self.stream.layers.setdefault(name, cut) != cut:
            raise Unproven(f"{name} takes parts of the sequence in one call and all of it in another")

    def before_mixture(self, name: str, given: list[Tensor]) -> None:
        self.mixture_read_quietly(name, given)

    def mixture_read_quietly(self, name: str, given: list[Tensor]) -> None:
        if any(id(tensor) in self._splits for tensor in given):
            raise Unproven(f"{name} takes a part of the sequence, and needs it whole")

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        self.read_quietly(None, None, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])

    def read_quietly(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        if any(id(tensor) in self._splits for tensor in tensors):
            raise Unproven("a module that needs values of tensors reads a part of the sequence")

    def before_decision(self, number: int, tensors: list[Tensor]) -> None:
        if self._splits:  # of the residual
            raise Unproven("a condition is asked while a rank has a part of the residual")

    def before_rest(self, rest: Rest, tensors: list[Tensor]) -> None:
        self.rest_gives(rest, tensors)

    def rest_gives(self, rest: Rest, tensors: list[Tensor]) -> None:
        if self._local is not None or any(id(tensor) in self._splits for tensor in tensors):
            raise Unproven(f"{rest.module} branches on a condition, and a rank has a part of the sequence")

    def layer_called_quietly(self, name: str, x: Tensor) -> Tensor:
        self.read_quietly(None, None, [x])
        return super().layer_called_quietly(name, x)

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        packet = canonical(func)
        if self.stack is not None and not self._suspended and is_random(func, args):
            self.stream.random = True
        cut = [self._splits.get(id(tensor)) for tensor in tensors]
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.pass_origins(func, tensors, outputs)
        if any(storage_of(tensor) in self._features for tensor in tensors):
            self._features |= {storage_of(output) for output in outputs}
        if not any(cut):
            self._note_step(func, args, kwargs, tensors, outputs)
            return out
        if not self._local and packet not in _COPIES | _DROPOUT and torch.Tag.pointwise not in func.tags:
            raise Unproven(f"{packet} works on a residual that is cut along the sequence")
        for output, answer in zip(outputs, self._answers(func, packet, args, kwargs, tensors, outputs), strict=True):
            if answer is not None:
                if not self._local and answer not in (self._sequence(), self._flat()):
                    raise Unproven(f"{packet} turns the residual into {list(output.shape)}")
                self._splits[id(output)] = answer
        self._note_step(func, args, kwargs, tensors, outputs)
        return out

    def _note_step(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        if self._local is None:
            return
        arguments = as_shapes(args), {key: as_shapes(value) for key, value in kwargs.items()}
        shapes = [(Shape(output.shape), self._splits.get(id(output))) for output in outputs]
        self._local.steps.append(Step(canonical(func), arguments, constant_of(func, tensors), shapes))

    def gradient_code_called(self, name: str, tensors: list[Tensor], made: list[Tensor], works: Works) -> None:
        if any(id(tensor) in self._splits for tensor in tensors):
            raise Unproven(f"the residual is given to {name}, whose backward is code of its own")

    def _flat(self) -> Split:
        return Split(0, (self._shape[1],) * self._shape[0])

    def _answers(
        self, func: Any, packet: Any, args: Any, kwargs: Any, tensors: list[Tensor], outputs: list[Tensor]
    ) -> list[Split | None]:
        def mixed(tensor: Tensor) -> None:
            if not self._local and (tensor.dim() > 0 or self.has_origin(tensor)):
                raise Unproven(f"{packet} joins the residual with a whole tensor of {list(tensor.shape)}")
            if self.has_origin(tensor) and self.origin(tensor) is None:
                raise Unproven(f"{packet} joins the residual with an activation that is whole")

        rule = RULES.get(packet)
        if rule is None and torch.Tag.pointwise in func.tags:
            splits = [self._splits.get(id(tensor)) for tensor in tensors]
            shapes = [Shape(tensor.shape) for tensor in tensors]
            return [pointwise(shapes, splits, lambda index: mixed(tensors[index]))] * len(outputs)
        if rule is None:
            raise Unproven(f"no rule says what {packet} does to parts")
        whole = as_shapes(args)
        named = {key: as_shapes(value) for key, value in kwargs.items()}
        splits_of = [self._split_of(argument) for argument in args]

        def mix(index: int) -> None:
            if index >= 0 and isinstance(args[index], Tensor):
                mixed(args[index])

        # One rank: the rules then ask nothing of the length of the sequence, which need not divide.
        call = Call(whole, whole, (named, named), splits_of, [Shape(t.shape) for t in outputs], 1, 0, mix)
        answer = rule(call)
        return answer if isinstance(answer, list) else [answer] * len(outputs)

    def _split_of(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._splits.get(id(argument))
        if isinstance(argument, list | tuple):
            return [self._split_of(item) for item in argument]
        return None
