"""One call of a parallel model, followed op by op, and which hooks and modules would be shown a part in it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook

from tpkernels.nn.channel_parts import segments_copied
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.convolution import convolved, within_own_code
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.multihead import ParallelMultiheadAttention
from tpkernels.nn.own_call import called_within, calls_itself
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.packed_norm import norm_segments
from tpkernels.nn.packed_row import PackedRowParallelLinear
from tpkernels.nn.paired_convolution import (
    gives_channels,
    segments_given,
    segments_taken,
    takes_channels,
)  # fmt: skip
from tpkernels.nn.parameter_products import multiplied_by
from tpkernels.nn.part_statistics import taken_of
from tpkernels.nn.row import RowParallelLinear
from tpkernels.nn.sliced import read_packed, sliced_parameters
from tpkernels.partition import chunk_sizes
from tpkernels.planning.splits import Split
from tpkernels.sharding import nested_tensors
from tpkernels.sharding.kept_caches import attribute_of, kept_attributes, misfits
from tpkernels.sharding.part_tracking import Parts

__all__ = ["Followed", "foreign_hooks"]

_HOOKS = {
    "_forward_pre_hooks": ("input",),
    "_forward_hooks": ("output", "input"),
    "_backward_pre_hooks": ("output",),
    "_backward_hooks": ("output", "input"),
}
"""Kinds of hooks, and which of a module's tensors (or of their gradients) they see."""
_OURS = ("tpkernels.", "torch.", "transformers.utils.output_capturing")
"""Packages whose hooks may see parts; what transformers captures leaves through the model's output."""
_ANOTHER_PATH = (
    "it takes another path than the calls that the plan was proven for; make the plan with example_inputs as those of "
    'this call, or with overrides={...: "replicate"}'
)


@dataclass
class Followed(AbstractContextManager["Followed"]):
    """A call that is being followed."""

    model: nn.Module
    parts: Parts = field(default_factory=Parts)
    problems: list[str] = field(default_factory=list)
    other_ways: list[str] = field(default_factory=list)
    """Signs that the call takes another path than those that the plan was proven for."""
    unknown: list[str] = field(default_factory=list)
    """Rows that took what no rule could follow."""
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Followed:
        self.thread = threading.get_ident()
        self.names = {id(module): name for name, module in self.model.named_modules()}
        own = (module for module in self.model.modules() if isinstance(module, ParallelMultiheadAttention))
        self.own_rows = {id(module.out_proj) for module in own}
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and this would import it: for seconds
            # A compiler does not trace what a dispatch mode follows: blocks that are compiled run eagerly in this call.
            self.stack.enter_context(torch.compiler.set_stance("force_eager"))
        handle = register_module_forward_hook(self._called, with_kwargs=True)
        self.stack.callback(handle.remove)
        for module in self.model.modules():
            for tensor, dim in (*sliced_parameters(module), *kept_attributes(module).values()):
                self.parts.mark(tensor, frozenset([Split(dim, (tensor.shape[dim],))]))
        told = read_packed.set(self._packed_read)
        self.stack.callback(read_packed.reset, told)
        self.stack.callback(convolved.reset, convolved.set(self._convolved))
        self.stack.callback(called_within.reset, called_within.set(self._called_within))
        self.stack.callback(multiplied_by.reset, multiplied_by.set(self._multiplied))
        self.stack.callback(taken_of.reset, taken_of.set(self._statistic_taken))
        self.stack.enter_context(self.parts)
        return self

    def _packed_read(self, part: Tensor, dim: int, sizes: tuple[int, ...], copied: int, behind: int) -> None:
        self.parts.mark(part, frozenset([Split(dim, sizes, copied=copied, behind=behind)]))

    def _statistic_taken(self, x: Tensor) -> None:
        if threading.get_ident() == self.thread and self.parts.of(x) is None:
            self.other_ways.append(
                f"this call takes a sum, a mean, a spread or the maximum of a whole tensor of {list(x.shape)}, where "
                f"the plan knows those of what is cut: {_ANOTHER_PATH}"
            )

    def _multiplied(self, module: nn.Module, name: str, tensor: Tensor, dim: int, sums: bool) -> None:
        """A product with this rank's part of a parameter gives a part, or (``sums``) takes one."""
        if threading.get_ident() != self.thread or id(module) not in self.names:
            return
        split, mark = Split(dim, (tensor.shape[dim],)), self.parts.of(tensor)
        path = ".".join(filter(None, (self.names[id(module)], name)))
        if not sums:
            self.parts.mark(tensor, frozenset([split]))
        elif not mark:
            self.unknown.append(path)
        elif split not in mark:
            self.other_ways.append(
                f"this call multiplies a part by {path} that is not cut as the parameter is: {_ANOTHER_PATH}"
            )

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != self.thread or id(module) not in self.names:
            return
        if not calls_itself(module):
            self._layer_called(module, output, *args, **kwargs)
        if not within_own_code(module):
            self._follow_channels(module, args[0] if args else None, output)
        if module is not self.model:
            self._check_hooks(module, args, kwargs, output)

    def _layer_called(self, module: nn.Module, output: Tensor, *args: Any, **kwargs: Any) -> None:
        """Mark what a column gives, and check what a row takes."""
        sizes = _sizes_given(module)
        copied, behind = (module.copied, module.behind) if isinstance(module, PackedColumnParallelLinear) else (0, 0)
        if sizes and (copied or _leaves_places_out(module) or self.parts.of(output) is None):
            self.parts.mark(output, frozenset([Split(output.dim() - 1, sizes, copied=copied, behind=behind)]))
        if isinstance(module, RowParallelLinear) and not module.split_input and id(module) not in self.own_rows:
            sizes = module.sizes_taken if isinstance(module, PackedRowParallelLinear) else ()
            self._check_row(module, -1, *args, **{**kwargs, "sizes": sizes})
        if isinstance(module, ColumnParallelLinear) and module.gather_input:
            self._check_row(module, -1, *args, **kwargs)

    def _called_within(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        if threading.get_ident() == self.thread and id(module) in self.names:
            self._layer_called(module, output, x)

    def _convolved(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        if threading.get_ident() == self.thread and id(module) in self.names:
            self._follow_channels(module, x, output)

    def _follow_channels(self, module: nn.Module, x: Any, output: Any) -> None:
        """Mark what is cut by channels as the plan has proven it, and check what takes it."""
        if not isinstance(output, Tensor) or not isinstance(x, Tensor):
            return
        if takes_channels(module):
            self._check_row(module, -1 - len(module.kernel_size), x, sizes=segments_taken(module))  # type: ignore[arg-type]
        if gives_channels(module):
            channels = output.dim() - len(module.kernel_size) - 1  # type: ignore[arg-type]
            sizes = segments_given(module) or (output.shape[channels],)
            copied, behind = segments_copied(module)
            self.parts.mark(output, frozenset([Split(channels, sizes, copied=copied, behind=behind)]))
        elif isinstance(module, _NormBase) or (
            isinstance(module, nn.GroupNorm | _ConvNd) and getattr(module, "_tpk_sliced", None) is not None
        ):
            mark, packed = self.parts.of(x), norm_segments(module)
            if mark and Split(1, packed or (x.shape[1],)) in mark:
                self.parts.mark(output, frozenset([Split(1, packed or (output.shape[1],))]))

    def _check_row(self, module: nn.Module, dim: int, x: Tensor, *, sizes: tuple[int, ...] = (), **_: object) -> None:
        """Refuse an input that a row's weight is not cut for: the plan's proof holds for calls like the traced ones."""
        mark, name = self.parts.of(x), self.names[id(module)]
        if not mark:
            self.unknown.append(name)
        elif Split(dim % x.dim(), sizes or (x.shape[dim],)) not in mark:
            self.other_ways.append(
                f"this call gives {name!r}, a row of the plan, a part that is not cut by features or channels as its "
                f"weight is: {_ANOTHER_PATH}"
            )

    def _check_hooks(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hooks = list(foreign_hooks(module))
        if not hooks:
            return
        takes = isinstance(module, RowParallelLinear) and not module.split_input
        takes = takes or (isinstance(module, ColumnParallelLinear) and module.gather_input)
        cut = {
            "input": takes or any(map(self._is_part, nested_tensors.leaves((args, kwargs)))),
            "output": any(map(self._is_part, nested_tensors.leaves(output))),
        }
        for kind, hook in hooks:
            for what in (what for what in _HOOKS[kind] if cut[what]):
                self.problems.append(
                    f"the hook {getattr(hook, '__qualname__', hook)!s} on module {self.names[id(module)]!r} would see "
                    f"this rank's part of the module's {what}: hook a module whose {what} is whole (the one around "
                    "it), or set takes_parts = True on the hook"
                )

    def _is_part(self, leaf: nested_tensors.Leaf) -> bool:
        return self.parts.of(leaf.tensor) is not None

    def check_attributes(self) -> None:
        """Refuse modules that keep parts, which other code could read, or keep none where the plan says so."""
        for module in self.model.modules():
            for name, why in misfits(module).items():
                path = ".".join(filter(None, (self.names[id(module)], name)))
                self.problems.append(f"{path} keeps a tensor of {why}: {_ANOTHER_PATH}")
            if type(module).__module__.startswith("tpkernels.") or getattr(module, "takes_parts", False):
                continue
            named = {key: value for key, value in vars(module).items() if not key.startswith("_")} | module._buffers
            kept = {attribute_of(key) for key in kept_attributes(module)}
            named = {key: value for key, value in named.items() if key not in kept}
            held = {key: value for key, value in named.items() if isinstance(value, Tensor | list | tuple | dict)}
            for leaf in nested_tensors.leaves(held):
                if leaf.holder is None and self._is_part(leaf):
                    path = ".".join(filter(None, (self.names[id(module)], nested_tensors.name_of(leaf.path))))
                    self.problems.append(
                        f"{path} is this rank's part of something: set takes_parts = True on the module if nobody "
                        "reads it but the module itself"
                    )


def foreign_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Hooks on a module that are neither ours nor torch's, and did not ask for parts."""
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            inner = hook
            while isinstance(inner, functools.partial):
                inner = inner.func
            home = getattr(inner, "__module__", None) or type(inner).__module__
            if not str(home).startswith(_OURS) and not getattr(inner, "takes_parts", False):
                yield kind, inner


def _sizes_given(module: nn.Module) -> tuple[int, ...]:
    """This rank's features of each segment of what a layer gives, if that is a part."""
    if isinstance(module, FeatureParallelEmbedding):
        rank, sizes = module.mesh.get_local_rank(), chunk_sizes(module.embedding_dim, module.mesh.size())
        return () if module.gather_output else (sizes[rank],)
    if isinstance(module, ColumnParallelLinear) and module.gather_output:
        return ()
    if isinstance(module, ColumnParallelLinear | PackedColumnParallelLinear | CopiedHeadsLinear):
        widths = [layer.block_widths() for layer in _layers_of(module)]
        return tuple(
            sum(of_blocks) if of_blocks else weight.shape[0]
            for of_blocks, (weight, _) in zip(widths, module.parts(), strict=True)
        )
    return ()


def _layers_of(module: nn.Module) -> list[Any]:
    return module.layers if isinstance(module, PackedColumnParallelLinear) else [module]


def _leaves_places_out(module: nn.Module) -> bool:
    """Whether the output is made of what the op gave, which was followed, in a way that is not."""
    return not isinstance(module, FeatureParallelEmbedding) and any(one.block_widths() for one in _layers_of(module))
