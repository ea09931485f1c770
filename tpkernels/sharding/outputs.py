"""Whatever leaves a parallel model as a part is made whole, or refused by name.

A plan is proven for the call that was traced.  A call with other flags (``output_attentions=True``) may return what no
proof saw: the attention of this rank's heads.  So the first call of each kind is followed op by op
(:class:`tpkernels.sharding.part_tracking.Parts`), the ranks tell each other what is a part in what it returns, and
that call and all later ones of its kind return whole tensors:

- a part whose layout is known is gathered; gradients flow back to each rank's part;
- a DTensor (the residual under sequence parallelism) becomes a plain tensor;
- an object that keeps parts for the next call (a key-value cache) is guarded, see
  :mod:`tpkernels.sharding.kept_caches`;
- any other part is ValueError, and so are hooks that would be shown a part, and modules that keep one as attribute.
  A hook, or a module, with an attribute ``takes_parts = True`` is left alone.

What a row takes is looked at as well: a part that is known to be cut otherwise than the row's weight is ValueError, and
where no rule could follow the way to it, rank 0 warns (:class:`tpkernels.errors.UnprovenCallWarning`).  A whole tensor
that needs a gradient, meets parts, and has none that is summed over the ranks is ValueError, too.  Where the call
raises an error of torch's, such as of shapes that do not fit, a note at the error says what may be the cause.

The kind of a call: which arguments there are, their flags, dtypes and which of their sizes are 1; training or not;
gradients or not; the flags and texts in the model's configs; which parts its modules keep, as the plan says.  Flags
that a module keeps elsewhere are no part of it; where they change what the model returns, the call raises, and the next
one is followed again.

Under ``torch.compile`` and ``torch.export`` nothing is followed: what the plan says of results is gathered, and
``output_attentions`` is refused there.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn.parameters import tp_mesh
from tpkernels.ops import all_gather
from tpkernels.ops.agreed_call import exchange
from tpkernels.ops.checks import DTYPES
from tpkernels.partition import chunk_sizes
from tpkernels.planning.splits import Split
from tpkernels.sharding import kept_caches, nested_tensors
from tpkernels.sharding.followed_calls import Followed, foreign_hooks
from tpkernels.sharding.part_tracking import UNKNOWN, Mark, Parts
from tpkernels.verification.model_passes import is_compared

__all__ = ["whole_outputs"]

_MOST_KINDS = 256
_FLAGS = ("output_attentions",)
"""Of transformers: what asks for parts."""


def whole_outputs(model: nn.Module, mesh: GroupLike, cut: Sequence[tuple[int, int, int]] = ()) -> None:
    """Make every tensor whole that a call of ``model`` returns as a part, from now on.

    ``parallelize`` does this for plans that are proven.  An explicit mapping of names to styles is carried out as it
    stands, and what leaves such a model as a part is its caller's, unless this is called.

    ``cut``: of a plan, what is cut of what the model returns, for compiled code: the number among the results, the
    dimension, and the size of that in the whole.

    Examples:
        >>> model = tpk.parallelize(nn.Sequential(nn.Linear(8, 32)), mesh["tp"], {"0": "column"})
        >>> tpk.sharding.whole_outputs(model, mesh["tp"])
        >>> model(torch.ones(4, 8)).shape
        torch.Size([4, 32])
    """
    tp = tp_mesh(mesh, model)
    if tp.size() == 1:
        return
    guard = _Guard(tp, cut)
    model.register_forward_pre_hook(guard.before, with_kwargs=True)
    guard.end = model.register_forward_hook(guard.after, with_kwargs=True, always_call=True).id


@dataclass(frozen=True)
class _Cut:
    """How a part at ``path`` is cut: the segments of every rank along ``dim``."""

    path: nested_tensors.Path
    dim: int
    segments: tuple[tuple[int, ...], ...]

    def gather(self, part: Tensor, mesh: DeviceMesh) -> Tensor:
        firsts = [own[0] for own in self.segments]
        if all(len(own) == 1 for own in self.segments):
            return self._gather(part, mesh, self.dim, firsts)
        own = self.segments[mesh.get_local_rank()]
        if all(len(set(some)) == 1 for some in self.segments):
            runs = part.unflatten(self.dim, (-1, own[0]))
            return self._gather(runs, mesh, self.dim + 1, firsts).flatten(self.dim, self.dim + 1)
        pieces = part.split(list(own), self.dim)
        sizes = zip(*self.segments, strict=True)
        wholes = [self._gather(x, mesh, self.dim, list(of)) for x, of in zip(pieces, sizes, strict=True)]
        return torch.cat(wholes, self.dim)

    @staticmethod
    def _gather(x: Tensor, mesh: DeviceMesh, dim: int, sizes: list[int]) -> Tensor:
        return all_gather(x.contiguous(), mesh, dim=dim, shard_sizes=sizes, replicated_grad=True)


@dataclass
class _Kind:
    """What happens to the results of one kind of calls."""

    changes: dict[nested_tensors.Path, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    keepers: list[tuple[nested_tensors.Path, list[tuple[Any, kept_caches.Kept]]]] = field(default_factory=list)
    """Objects in ``(args, kwargs, output)``, by what they are in: a cache has one for each layer of the model."""
    outline: Any = None
    hooks: set[frozenset[int]] = field(default_factory=set)
    """Sets of other people's hooks that have been checked."""


class _Calls(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Any, _Kind | None, Followed | None]] = []


class _Guard:
    """The hooks around a model."""

    def __init__(self, mesh: DeviceMesh, cut: Sequence[tuple[int, int, int]]) -> None:
        self._mesh, self._cut = mesh, tuple(cut)
        self._kinds: dict[Any, _Kind] = {}
        self._calls = _Calls()
        self._configs: list[dict[str, Any]] | None = None
        self._keepers: list[nn.Module] | None = None
        self._handles = -1
        self._hooks: frozenset[int] = frozenset()
        self.end = -1
        """The number of the hook after a call, without which there must be none before it."""

    def __deepcopy__(self, memo: Any) -> _Guard:
        twin = _Guard(self._mesh, self._cut)
        twin.end = self.end
        return twin

    # ------------------------------------------------------------------ hooks

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            _refuse_flags(model, kwargs)
            return
        if self.end not in model._forward_hooks:
            raise RuntimeError("the hook that makes outputs whole has been removed from the model's forward hooks")
        key, hooks = self._key(model, args, kwargs), self._foreign(model)
        kind, followed = self._kinds.get(key), None
        kept_caches.enter()
        if (kind is None or hooks not in kind.hooks) and detect_fake_mode() is None:
            followed = Followed(model)
            followed.__enter__()
            _mark_kept(followed.parts, (args, kwargs))
        self._calls.stack.append((key, kind, followed))

    def after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return _gathered(output, self._cut, self._mesh) if self._cut else None
        if not self._calls.stack:
            return None
        key, kind, followed = self._calls.stack.pop()
        kept_caches.leave()
        if followed is not None:
            followed.__exit__()
            if output is None:  # the call raised
                _hint(sys.exception())
                return None
            kind = self._learn(key, kind, followed, (args, kwargs, output))
        if kind is None or output is None:
            return None
        return self._finish(key, kind, args, kwargs, output)

    def _finish(self, key: Any, kind: _Kind, args: Any, kwargs: Any, output: Any) -> Any:
        if (kind.changes or kind.keepers) and nested_tensors.outline(output) != kind.outline:
            del self._kinds[key]
            raise ValueError(
                "this call returned other things than earlier ones with the same arguments and the same configuration, "
                "so the ranks do not know which of them are parts: call again, and that call will be followed"
            )
        for path, holders in kind.keepers:
            around = nested_tensors.look((args, kwargs, output), path)
            for key, how in holders:
                kept_caches.guard(nested_tensors.look(around, (key,)), how)
        if not kind.changes:
            return None
        done: dict[int, Tensor] = {}

        def once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                if id(x) not in done:
                    done[id(x)] = change(x)
                return done[id(x)]

            return run

        return nested_tensors.replaced(output, {path: once(change) for path, change in kind.changes.items()})

    # ------------------------------------------------------------------ kinds of calls

    def _key(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._configs is None:
            configs = {id(config): config for config in map(_config_of, model.modules()) if config is not None}
            self._configs = list(configs.values())
        flags = [value for config in self._configs for value in config.values() if value.__class__ in (bool, str)]
        given = tuple([(name, _fact(value)) for name, value in kwargs.items()])
        if self._keepers is None:
            self._keepers = [module for module in model.modules() if kept_caches.kept_by(module) is not None]
        state = tuple(name for module in self._keepers for name in kept_caches.kept_attributes(module))
        return model.training, torch.is_grad_enabled(), tuple(map(_fact, args)), given, tuple(flags), state

    def _foreign(self, model: nn.Module) -> frozenset[int]:
        """Hooks of other code; the model is searched again only if a hook has been made since the last time."""
        if RemovableHandle.next_id != self._handles:
            self._handles = RemovableHandle.next_id
            modules = (module for module in model.modules() if module is not model)
            self._hooks = frozenset(id(hook) for module in modules for _, hook in foreign_hooks(module))
        return self._hooks

    def _learn(self, key: Any, kind: _Kind | None, followed: Followed, values: tuple[Any, Any, Any]) -> _Kind:
        """The kind of a call that was followed; a kind that all ranks know costs no word between them."""
        followed.check_attributes()
        incomplete = [
            "this call takes another path than those that the plan was proven for: a gradient would be incomplete, "
            f"that of {where}; make the plan with example_inputs like those of this call"
            for where in followed.parts.incomplete
        ]
        problems = followed.problems + ([] if is_compared() else followed.other_ways + incomplete)
        if kind is None:
            kind = self._agree(followed.parts, problems, values)
        elif problems:
            raise ValueError(_listing(problems))
        if followed.unknown and not is_compared() and self._mesh.get_local_rank() == 0:
            rows = sorted(set(followed.unknown))
            warnings.warn(
                f"no rule can tell whether the inputs of {', '.join(rows[:4])}{' and others' if len(rows) > 4 else ''} "
                "in this call are cut as their weights are: if the call takes a path that the plan was not proven for, "
                "its result may be wrong. Run tpk.verify with these arguments to find out",
                UnprovenCallWarning,
                stacklevel=2,
            )
        kind.hooks.add(self._hooks)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[key] = kind
        return kind

    def _agree(self, parts: Parts, problems: list[str], values: tuple[Any, Any, Any]) -> _Kind:
        """Decide what is to be done, from what all ranks have seen."""
        seen = list(_parts_in(parts, values))
        paths = [nested_tensors.name_of(leaf.path) for leaf, _ in seen]
        mine = {"problems": problems, "paths": paths, "cuts": [_said(mark) for _, mark in seen]}
        said = exchange(resolve(self._mesh), "outputs of a model", mine)
        wrong = {text: None for one in said for text in one["problems"]}
        if any(one["paths"] != paths for one in said):
            wrong["the ranks return different things"] = None
        kind = _Kind(outline=nested_tensors.outline(values[2]))
        keeps: dict[nested_tensors.Path, dict[str, tuple[int, int] | Split | None]] = {}
        for index, (leaf, _) in enumerate(seen if not wrong else ()):
            self._treat(kind, keeps, wrong, leaf, [one["cuts"][index] for one in said])
        if wrong:
            raise ValueError(_listing(list(wrong)))
        around: dict[nested_tensors.Path, list[tuple[Any, kept_caches.Kept]]] = {}
        for path, cuts in keeps.items():
            around.setdefault(path[:-1], []).append((path[-1], kept_caches.Kept(self._mesh, cuts)))
        kind.keepers = list(around.items())
        return kind

    def _treat(
        self, kind: _Kind, keeps: Any, wrong: dict[str, None], leaf: nested_tensors.Leaf, said: list[Any]
    ) -> None:
        cut = _joined(leaf, said)
        if leaf.holder is not None:
            attribute = leaf.path[len(leaf.holder)][1:]
            is_plain = len(leaf.path) == len(leaf.holder) + 1
            rank = self._mesh.get_local_rank()
            keeps.setdefault(leaf.holder, {})[attribute] = _as_kept(cut, rank) if cut is not None and is_plain else None
        elif isinstance(leaf.tensor, DTensor):
            kind.changes[leaf.path[1:]] = _full
        elif leaf.path[0] != _OUTPUT:
            wrong[f"{nested_tensors.name_of(leaf.path)} is the caller's, and a part was written into it"] = None
        elif cut is None or leaf.tensor.dtype not in DTYPES:
            how = "no rule says how it is cut" if cut is None else f"{leaf.tensor.dtype} cannot be gathered"
            if cut is None and all(said):
                how = "with one head on a rank it could be cut in more than one way (a batch of two may tell)"
            wrong[
                f"{nested_tensors.name_of(leaf.path[1:])} is this rank's part of a larger tensor, and {how}: do not "
                'ask for it, or make the plan with overrides={...: "replicate"} for the layers that it comes from'
            ] = None
        else:
            kind.changes[leaf.path[1:]] = functools.partial(cut.gather, mesh=self._mesh)


_OUTPUT = 2
_CACHED = (".keys", ".values")
"""Of the layers of transformers' caches."""


def _parts_in(parts: Parts, values: tuple[Any, Any, Any]) -> Iterator[tuple[nested_tensors.Leaf, Mark]]:
    """Tensors in ``(args, kwargs, output)`` that are not whole, once if an object is among both."""
    known: set[int] = set()
    for place in (_OUTPUT, 1, 0):
        for leaf in nested_tensors.leaves(values[place]):
            mark = UNKNOWN if isinstance(leaf.tensor, DTensor) else parts.of(leaf.tensor)
            if mark is None or (place != _OUTPUT and (id(leaf.tensor) in known or isinstance(leaf.tensor, DTensor))):
                continue
            known.add(id(leaf.tensor))
            holder = None if leaf.holder is None else (place, *leaf.holder)
            yield nested_tensors.Leaf((place, *leaf.path), leaf.tensor, holder), mark


def _said(mark: Mark) -> list[list[Any]]:
    """A mark in the form in which it is sent to the other ranks; parts beside copies cannot be gathered."""
    ways = sorted((split.dim, list(split.segments)) for split in mark if not split.copied)
    return [[dim, segments] for dim, segments in ways]


def _gathered(output: Any, cut: tuple[tuple[int, int, int], ...], mesh: DeviceMesh) -> Any:
    """What compiled code returns, with the results whole that the plan knows as parts."""
    results, form = tree_flatten(output)
    for number, dim, total in cut:
        sizes = chunk_sizes(total, mesh.size())
        x = results[number] if number < len(results) else None
        if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[dim] != sizes[mesh.get_local_rank()]:
            raise ValueError("this call returns other things than the plan was proven for, and compiled code cannot "
                             "follow which of them are parts: call the model without torch.compile")  # fmt: skip
        results[number] = _Cut._gather(x, mesh, dim, list(sizes))
    return tree_unflatten(results, form)


def _full(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor).full_tensor()


def _joined(leaf: nested_tensors.Leaf, said: list[list[Any]]) -> _Cut | None:
    """The one layout that every rank's sizes allow, or None."""
    ways = [{(dim, len(segments)): tuple(segments) for dim, segments in one} for one in said]
    common = sorted(set(ways[0]).intersection(*ways[1:]))
    if len(common) > 1 and leaf.path[-1] in _CACHED and leaf.tensor.dim() == 4:  # [batch, heads, length, features]
        common = [way for way in common if way == (1, 1)] or [way for way in common if way[0] == 1] or common
    if len(common) != 1:
        return None
    return _Cut(leaf.path, common[0][0], tuple(way[common[0]] for way in ways))


def _as_kept(cut: _Cut, rank: int) -> tuple[int, int] | Split | None:
    """Dimension and whole size, where DTensor's ``Shard`` cuts alike; this rank's runs, where there are several."""
    if any(len(own) != 1 for own in cut.segments):
        return Split(cut.dim, cut.segments[rank])
    sizes = tuple(own[0] for own in cut.segments)
    return (cut.dim, sum(sizes)) if sizes == chunk_sizes(sum(sizes), len(sizes)) else None


def _mark_kept(parts: Parts, values: Any) -> None:
    """What objects among the arguments keep from earlier calls."""
    for leaf in nested_tensors.leaves(values):
        if leaf.holder is None or not leaf.tensor.numel():
            continue
        kept_parts = kept_caches.kept_by(nested_tensors.look(values, leaf.holder))
        if kept_parts is not None and leaf.path[len(leaf.holder)][1:] in kept_parts.cuts:
            cut = kept_parts.cuts[leaf.path[len(leaf.holder)][1:]]
            runs = _whole_dim(leaf.tensor, cut[0]) if isinstance(cut, tuple) else cut
            is_plain = len(leaf.path) == len(leaf.holder) + 1
            fits = runs is not None and is_plain and sum(runs.segments) == leaf.tensor.shape[runs.dim]
            parts.mark(leaf.tensor, frozenset([runs]) if runs is not None and fits else UNKNOWN)


def _whole_dim(tensor: Tensor, dim: int) -> Split:
    return Split(dim, (tensor.shape[dim],))


def _fact(value: Any) -> Any:
    """Facts of an argument that may decide which path a model takes, apart from the sizes of its tensors."""
    kind = value.__class__
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, Tensor):
        return value.dtype, tuple([size == 1 for size in value.shape])
    if kind is int:
        return value if -2 < value < 16 else int  # a small one is a flag, or an index; a larger one a position
    if isinstance(value, Mapping):
        return tuple([(key, _fact(item)) for key, item in value.items()])
    if kind is list or kind is tuple:
        return kind, tuple(map(_fact, value)) if len(value) <= 64 else len(value)
    return kind


def _hint(error: BaseException | None) -> None:
    """Say what may be the cause of an error of torch's in the first call of a kind."""
    if type(error) is RuntimeError:  # as of shapes that do not fit; errors of ours are of other classes, or say more
        error.add_note(
            "This is the parallel model's first call of its kind. If the unsharded model runs with these arguments, "
            "the call takes another path than those that the plan was proven for, such as one that keeps a state "
            "(use_cache=True): make the plan with example_inputs as those of this call, in a list with the others"
        )


def _config_of(module: nn.Module) -> dict[str, Any] | None:
    config = getattr(module, "config", None)
    return config.__dict__ if hasattr(config, "__dict__") and not isinstance(config, nn.Module) else None


def _refuse_flags(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    for flag in _FLAGS:
        value = kwargs.get(flag)
        if value is None:
            value = getattr(getattr(model, "config", None), flag, False)
        if value:
            raise ValueError(f"{flag}=True asks for parts of the ranks, which are not gathered in compiled code: call "
                             "the model without torch.compile for them")  # fmt: skip


def _listing(problems: list[str]) -> str:
    more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
    return "; ".join(problems[:4]) + more
