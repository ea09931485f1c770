"""Which tensors of a running model are parts: one forward pass, followed op by op on the real tensors of this rank.

It owns :class:`Parts`, a dispatch mode.  The outputs of column layers, and of sums over the ranks that leave parts, are
marked with how they are cut.  Ops pass marks on by the rules of :mod:`tpkernels.planning.replays.rules`; gathers and
all-reduces end them.  Whole shapes are unknown here, so the rules are asked as for one rank: local shapes are the whole
ones.

A dimension of which this rank has one element (one head) can be read in several ways after a ``view``.  A mark is
therefore the set of :class:`Split` that local sizes allow, and what follows rules most of them out.  An empty set is a
part whose layout no rule knows.  A mark keeps no tensor alive: a tensor is identified by its storage and its place in
it, because autograd makes new objects of views.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpkernels.nn.fused_norm import PendingSum
from tpkernels.planning.replays.op_call import is_pointwise
from tpkernels.planning.replays.rules import RULES, Call, pointwise
from tpkernels.planning.runs.events import Shape, as_shapes, canonical
from tpkernels.planning.runs.op_arguments import INDEXED, has_masks, memory_of, numbers_in
from tpkernels.planning.splits import Split, Unproven
from tpkernels.sharding.local_rules import OWN
from tpkernels.sharding.repeats import MADE_OF_ONE, Repeats, place_of, storage_of, written_to

__all__ = ["UNKNOWN", "Mark", "Parts", "cut_alike", "sums_gradient"]

Mark = frozenset[Split]
UNKNOWN: Mark = frozenset()

aten = torch.ops.aten
_COLUMN = {"copy_matmul": -1, "copy_grouped_matmul": -1, "all_gather_matmul": 7, "all_gather_scaled_matmul": 10}
"""Ops of column layers, and which argument asks for the gathered input as the last result."""
_WHOLE = {"all_gather", "all_reduce", "matmul_all_reduce", "matmul_all_reduce_norm", "add_norm",
          "scaled_matmul_all_reduce", "grouped_matmul_all_reduce"}  # fmt: skip
_ATTENTION = [op for op, rule in RULES.items() if rule is RULES[aten._scaled_dot_product_flash_attention_for_cpu]]
_SPREADS = {aten.baddbmm: (0,), aten.copy_: (1,), aten.bmm: (0, 1)} | dict.fromkeys(_ATTENTION, (3,))
"""Arguments, such as masks, that are broadcast over the cut dimension: what repeats there counts as having size 1."""
_MOST_READINGS = 16
"""Of all arguments of an op together."""
_here = threading.local()
"""In each thread, ``parts``: the innermost :class:`Parts` that follows it."""


def cut_alike(made: Tensor, like: Tensor) -> None:
    """Say of what was made for this rank's part ``like`` alone, such as a mask, that it is cut as that is.

    Outside of a call that is followed there is nobody to tell.
    """
    parts: Parts | None = getattr(_here, "parts", None)
    mark = None if parts is None else parts.of(like)
    if parts is not None and mark is not None:
        parts.mark(made, mark)


def sums_gradient(tensor: Tensor) -> None:
    """Say of a whole tensor, which code of this package made, that its gradient is summed over the ranks.

    Outside of a call that is followed there is nobody to tell.
    """
    parts: Parts | None = getattr(_here, "parts", None)
    if parts is not None:
        parts.note_summed(tensor)


class Parts(TorchDispatchMode):
    """Follows parts while it is the innermost mode but one of torch's own."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outer: list[Parts | None] = []
        self._marks: dict[Any, Mark] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        """Those known of; while the reference is held nothing else gets the storage's address."""
        self._cut: set[int] = set()
        """Storages in which a part lies; those of tensors that were uniform and were written to are not among them."""
        self._summed: set[int] = set()
        """Storages of whole tensors whose gradients are summed over the ranks, and of what is made of these and of
        constants alone: code may let a constant require a gradient, which nobody reads."""
        self._copies: set[Any] = set()
        """Places of what a packed part has whole on every rank, and of what is made of it: its gradient is summed."""
        self.incomplete: dict[str, None] = {}
        """Where a whole tensor meets parts whose gradient would be this rank's share of it."""
        self._repeats = Repeats(self._hold)

    def __enter__(self) -> Parts:
        self._outer.append(getattr(_here, "parts", None))
        _here.parts = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _here.parts = self._outer.pop()

    def of(self, tensor: Tensor) -> Mark | None:
        """How ``tensor`` is cut, or None if it is whole."""
        if not self._cut or isinstance(tensor, DTensor | PendingSum):
            return None
        storage = storage_of(tensor)
        if storage is None or storage._cdata not in self._cut or storage in self._repeats:
            return None
        place = place_of(tensor, storage)
        return None if place in self._copies else self._marks.get(place, UNKNOWN)

    def mark(self, tensor: Tensor, mark: Mark) -> None:
        """Remember that ``tensor`` is a part."""
        storage = storage_of(tensor)
        if storage is not None:
            self._hold(storage)
            self._repeats.drop(storage)
            self._cut.add(storage._cdata)
            self._marks[place_of(tensor, storage)] = mark
            self._copies.discard(place_of(tensor, storage))

    def _hold(self, storage: Any) -> None:
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def mark_last(self, tensor: Tensor) -> None:
        """``tensor`` is what a layer gives whose output features are cut."""
        self.mark(tensor, _cut(tensor, -1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's turn: what it makes of the op comes here next
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = getattr(func, "_schema", None)
        if name is not None and func.namespace == "tpkernels":
            out = func(*args, **kwargs)
            self._fused(name.name.removeprefix("tpkernels::"), args, tensors, out)
            return out
        marks = [self.of(tensor) for tensor in tensors]
        is_op = isinstance(func, torch._ops.OpOverload)
        packet = canonical(func) if is_op else func
        if all(mark is None for mark in marks):
            out = func(*args, **kwargs)
            self._repeats.forget(func, args, kwargs)
            if is_op:
                self._repeats.note(func, packet, tensors, out)
                self._note_summed(tensors, out)
                self._note_copies(packet, tensors, out)
            return out
        if is_op and packet not in RULES and packet not in OWN:
            with self:
                taken_apart = func.decompose(*args, **kwargs)
            if taken_apart is not NotImplemented:
                return taken_apart
        out = func(*args, **kwargs)
        if packet in MADE_OF_ONE or getattr(func, "namespace", "") == "prim":
            self._repeats.note(func, packet, tensors, out)
            return out
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]

        def broadcast(met: Collection[Split]) -> list[Shape]:
            known = zip(tensors, marks, strict=True)
            return [self._repeats.shape(tensor, whole=mark is None, met=met) for tensor, mark in known]

        answers, mixed = _answers(func, packet, args, kwargs, tensors, marks, outputs, broadcast)
        self._check_gradients(packet, mixed)
        constants = self._repeats.forget(func, args, kwargs)
        for output, answer in zip(outputs, answers, strict=True):
            if answer and all(split.is_whole for split in answer):
                self._copy(output)
            elif answer is not None:
                self.mark(output, answer)
        for written in written_to(func, args, kwargs):
            known = [answer for output, answer in zip(outputs, answers, strict=True) if written is output]
            if not known:
                self.mark(written, UNKNOWN)
            self._mark_around(written, known[0] if known else UNKNOWN, constants)
        return out

    def _mark_around(self, written: Tensor, mark: Mark | None, constants: Sequence[Any]) -> None:
        """A part was written to a view: a constant around it is a part that is cut alike, anything else is unknown."""
        storage = storage_of(written)
        if storage is None or mark is None:
            return
        place = place_of(written, storage)
        for around in [at for at in self._marks if at[0] == storage._cdata and at != place] if not mark else ():
            self._marks[around] = UNKNOWN
        for around in constants:
            if around[0] == storage._cdata and around != place:
                self._marks[around] = _around(place, mark, around)

    def _note_summed(self, tensors: Sequence[Tensor], out: Any) -> None:
        """Outputs of ops on whole tensors."""
        needing = [tensor for tensor in tensors if tensor.requires_grad]
        if needing and all(self._is_summed(tensor) for tensor in needing):
            for output in tree_leaves(out):
                if isinstance(output, Tensor):
                    self.note_summed(output)

    def note_summed(self, tensor: Tensor) -> None:
        """Remember that the gradient of ``tensor``, which is whole, is summed over the ranks."""
        storage = storage_of(tensor)
        if storage is not None:
            self._hold(storage)
            self._summed.add(storage._cdata)

    def _note_copies(self, packet: Any, tensors: Sequence[Tensor], out: Any) -> None:
        """What is made of copies is one, unless it is a head's for each of this rank's: that is a part."""
        if not any(map(self._is_copy, tensors)) or not all(map(self._is_summed, filter(_needs_gradient, tensors))):
            return
        for output in tree_leaves(out):
            ones = [dim - tensors[0].dim() for dim, size in enumerate(tensors[0].shape) if size == 1]
            if packet is aten.expand and ones:
                dims = [dim + output.dim() for dim in ones]
                self.mark(output, frozenset(Split(dim, (output.shape[dim],)) for dim in dims))
            elif isinstance(output, Tensor) and storage_of(output) is not None:
                self._copy(output)

    def _copy(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        self._hold(storage)
        self._copies.add(place_of(tensor, storage))

    def _is_copy(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor) if self._copies else None
        return storage is not None and place_of(tensor, storage) in self._copies

    def _is_summed(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        summed = storage is not None and (storage._cdata in self._summed or self._repeats.is_constant(tensor))
        return summed or self._is_copy(tensor)

    def _check_gradients(self, packet: Any, mixed: Sequence[Tensor]) -> None:
        for tensor in mixed if torch.is_grad_enabled() else ():
            if tensor.requires_grad and not self._is_summed(tensor):
                self.incomplete[f"{packet} of a tensor of {list(tensor.shape)} with this rank's part of another"] = None

    def _fused(self, name: str, args: Any, tensors: Sequence[Tensor], out: Any) -> None:
        """Mark the results of this package's own ops, each of which determines how they are cut."""
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if name in _WHOLE:
            if name == "all_gather" and not args[4]:  # ranks go on to use it differently
                self.note_summed(outputs[0])
            return
        if name in _COLUMN:
            is_gathered = _COLUMN[name] > 0 and args[_COLUMN[name]]
            for output in outputs[: len(outputs) - bool(is_gathered)]:
                self.mark_last(output)
        elif name == "matmul_reduce_scatter_norm":
            for output in outputs[:2]:  # normed and sums
                self.mark(output, _cut(output, args[7]))
        elif name in ("matmul_reduce_scatter", "reduce_scatter", "shard"):
            self.mark(outputs[0], _cut(outputs[0], args[4] if name == "matmul_reduce_scatter" else args[2]))
        elif name == "copy_to_group":
            mark = self.of(tensors[0])
            if mark is not None:
                self.mark(outputs[0], mark)
            else:
                self.note_summed(outputs[0])
        else:
            for output in outputs["cross_entropy" in name :]:  # the loss is whole, what backward needs is not
                self.mark(output, UNKNOWN)


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad


def _around(place: Any, mark: Mark, around: Any) -> Mark:
    """How a tensor is cut whose view at ``place`` is a part: in the dimension with the same steps and size."""
    (_, _, shape, stride, dtype), (_, _, shape_around, stride_around, dtype_around) = place, around
    steps = list(zip(shape_around, stride_around, strict=True))
    if dtype != dtype_around or any(steps.count((shape[split.dim], stride[split.dim])) != 1 for split in mark):
        return UNKNOWN
    return frozenset(Split(steps.index((shape[split.dim], stride[split.dim])), split.segments) for split in mark)


def _cut(tensor: Tensor, dim: int) -> Mark:
    dim %= tensor.dim()
    return frozenset([Split(dim, (tensor.shape[dim],))])


def _answers(
    func: Any,
    packet: Any,
    args: Any,
    kwargs: Any,
    tensors: Sequence[Tensor],
    marks: Sequence[Mark | None],
    outputs: Sequence[Tensor],
    broadcast: Callable[[Collection[Split]], list[Shape]],
) -> tuple[list[Mark | None], list[Tensor]]:
    """How each output is cut, by the layouts that any reading of the arguments allows; whole tensors that met parts."""
    known = {id(tensor): mark for tensor, mark in zip(tensors, marks, strict=True) if mark is not None}
    shapes = [Shape(output.shape) for output in outputs]
    if UNKNOWN in known.values() or prod(map(len, known.values())) > _MOST_READINGS:
        return [UNKNOWN] * len(outputs), []
    met: list[Tensor] = []
    found: list[set[Split]] = [set() for _ in outputs]
    whole = [False] * len(outputs)
    for reading in product(*known.values()):
        splits = dict(zip(known, reading, strict=True))
        try:
            answers, mixed = _one_reading(func, packet, args, kwargs, tensors, splits, shapes, broadcast)
        except Unproven:
            continue
        met += mixed
        for index, (answer, shape) in enumerate(zip(answers, shapes, strict=True)):
            if answer is None:
                whole[index] = True
            else:
                found[index] |= {split for split in answer if _fits(split, shape)}
    marked = [None if is_whole and not some else frozenset(some) for is_whole, some in zip(whole, found, strict=True)]
    return marked, met


def _fits(split: Split, shape: Sequence[int]) -> bool:
    return split.dim < len(shape) and shape[split.dim] == sum(split.segments)


def _one_reading(
    func: Any,
    packet: Any,
    args: Any,
    kwargs: Any,
    tensors: Sequence[Tensor],
    splits: dict[int, Split],
    shapes: Sequence[Shape],
    broadcast: Callable[[Collection[Split]], list[Shape]],
) -> tuple[Sequence[set[Split] | None], list[Tensor]]:
    mixed: list[Any] = []
    broadcast_shapes = broadcast(splits.values())

    def split_of(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return splits.get(id(argument))
        return [split_of(item) for item in argument] if isinstance(argument, list | tuple) else None

    def mix(index: int) -> None:
        mixed.append(kwargs.get("attn_mask") if index < 0 else args[index])

    def done(answers: Sequence[set[Split] | None]) -> tuple[Sequence[set[Split] | None], list[Tensor]]:
        return answers, [tensor for tensor in mixed if isinstance(tensor, Tensor)]

    if packet not in RULES and packet not in OWN and is_pointwise(func):
        cuts = [splits.get(id(tensor)) for tensor in tensors]
        return done([{pointwise(broadcast_shapes, cuts, lambda index: mixed.append(tensors[index]))}] * len(shapes))
    spread = {id(tensor): shape for tensor, shape in zip(tensors, broadcast_shapes, strict=True)}
    whole = [
        spread[id(argument)] if index in _SPREADS.get(packet, ()) and isinstance(argument, Tensor) else shape
        for index, (argument, shape) in enumerate(zip(args, as_shapes(args), strict=True))
    ]
    named = {key: spread[id(v)] if key == "attn_mask" and v is not None else as_shapes(v) for key, v in kwargs.items()}
    if isinstance(kwargs.get("attn_mask"), Tensor):
        named["attn_mask split"] = splits.get(id(kwargs["attn_mask"]))
    if packet is aten.index:
        named["indices"] = numbers_in(args[1])
    if packet in INDEXED:
        named["masks"] = has_masks(args[1])
    named |= memory_of(packet, tensors)
    if packet is aten.gather:
        named["index is alike along"] = {dim for dim, size in enumerate(spread[id(args[2])]) if size == 1}
    call = Call(whole, whole, (named, named), [split_of(argument) for argument in args], shapes, 1, 0, mix)
    own = OWN.get(packet)
    if own is not None:
        return done([own(call)] * len(shapes))
    rule = RULES.get(packet)
    if rule is None:
        raise Unproven(f"no rule says what {packet} does to parts")
    answer = rule(call)
    answers = answer if isinstance(answer, list) else [answer] * len(shapes)
    return done([None if split is None else {split} for split in answers])
