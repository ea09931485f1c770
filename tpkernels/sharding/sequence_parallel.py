"""Sequence parallelism at run time: the residual travels through the blocks as a DTensor cut along the sequence.

It owns the hooks that cut the residual before the first block and gather it after the last, hand each module the form
that it takes, and give each rank its own random numbers in between.  A DTensor has its whole shape, so the model's own
reshapes, masks and positions stay right.  :mod:`tpkernels.planning.replays.sequence_flow` has proven that only
elementwise ops and reshapes meet it.  The idea of carrying the residual as a DTensor is that of torch's
``SequenceParallel`` style.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.fused_norm import PendingSum, hand_on
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.row import RowParallelLinear
from tpkernels.ops import all_gather, shard
from tpkernels.partition import chunk_sizes
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.styles import Column, CopiedHeads, Row
from tpkernels.sharding.randomness import Fork
from tpkernels.sharding.sequence_blocks import SequenceBlocks

__all__ = ["run_sequence_parallel"]


class _Stack:
    """One list of blocks while its residual is cut."""

    def __init__(self, mesh: DeviceMesh, random: bool, same_bits: int) -> None:
        self.mesh = mesh
        self.shape: tuple[int, ...] = ()
        self.blocks = SequenceBlocks(mesh, same_bits, random) if same_bits else None
        self.fork = Fork() if random and mesh.size() > 1 and not same_bits else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every rank's length of the sequence, cut as DTensor's ``Shard`` cuts."""
        return chunk_sizes(self.shape[1], self.mesh.size())

    def cut(self, x: Tensor) -> DTensor:
        """This rank's part of a whole tensor ``[B, S, ...]``, or ``[B * S, ...]``."""
        batch, length = self.shape[:2]
        rows = x if tuple(x.shape[:2]) == (batch, length) else x.reshape(batch, length, *x.shape[1:])
        part = self.wrap(shard(rows, self.mesh, dim=1, shard_sizes=self.sizes))
        return part if rows is x else cast(DTensor, part.reshape(x.shape))

    def wrap(self, part: Tensor) -> DTensor:
        """A DTensor of the whole, of a part ``[B, S_r, ...]``."""
        shape = torch.Size((part.shape[0], self.shape[1], *part.shape[2:]))
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return DTensor.from_local(part, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=tuple(strides))

    def part(self, x: DTensor) -> Tensor:
        """This rank's part ``[B, S_r, ...]`` of the residual, which the model may have flattened to rows.

        Rows are given their shape back as a DTensor: cut along them it is strided, and of two strided ones, one made by
        a reshape and one by ``from_local``, torch 2.13 gathers both before it adds them.
        """
        return (cast(DTensor, x.view(*self.shape[:2], *x.shape[1:])) if self.is_flat(x) else x).to_local()

    def hold(self, module: nn.Module) -> None:
        """With same_bits, from here on nobody draws random numbers."""
        if self.blocks is not None and module.training:
            self.blocks.hold()

    def release(self, module: nn.Module) -> None:
        """Up to here nobody did; what comes next keeps the rules of its own."""
        if self.blocks is not None and module.training:
            self.blocks.release()

    def is_flat(self, x: Tensor) -> bool:
        """Whether ``x`` is rows ``[B * S, ...]``."""
        return tuple(x.shape[:2]) != self.shape[:2]

    def __deepcopy__(self, memo: object) -> _Stack:
        return self  # as the hooks of a copied model keep the one that they were made with

    def gather(self, x: DTensor) -> Tensor:
        """The whole tensor, equal on all ranks."""
        whole = all_gather(self.part(x), self.mesh, dim=1, shard_sizes=self.sizes, replicated_grad=True)
        return whole.reshape(x.shape)


def run_sequence_parallel(
    plan: ShardingPlan, modules: Mapping[str, nn.Module], mesh: DeviceMesh, same_bits: int = 0
) -> list[Fork]:
    """Install the hooks of a plan whose layers are swapped already; the regions with random numbers of a rank's own."""
    forks: list[Fork] = []
    stacks: dict[str, list[str]] = {}
    for block in plan.sequence_blocks:
        stacks.setdefault(block.rpartition(".")[0], []).append(block)
    for blocks in stacks.values():
        stack = _Stack(mesh, plan.sequence_random, same_bits)
        modules[blocks[0]].register_forward_pre_hook(_enter(stack), with_kwargs=True)
        inside = tuple(f"{block}." for block in blocks)
        for entry in plan.entries:
            style = entry.style
            if entry.path.startswith(inside) and isinstance(style, Column | CopiedHeads | Row):
                if style.sequence_parallel:
                    _join(stack, modules[entry.path])
        for name in plan.local_blocks:
            if name.startswith(inside):
                _keep_local(stack, modules[name])
        for name in plan.whole_blocks:
            if name.startswith(inside) or name in blocks:
                _make_whole(stack, modules[name])
        modules[blocks[-1]].register_forward_hook(_leave(stack))
        if stack.fork is not None:
            forks.append(stack.fork)
    return forks


def _enter(stack: _Stack) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        stack.shape = tuple(x.shape)
        if stack.blocks is not None:
            stack.blocks.enter(x)
        part = stack.cut(x)
        if stack.fork is not None and module.training:
            stack.fork.enter(x.device, stack.mesh.get_local_rank())
        stack.hold(module)
        return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": part})

    return hook


def _leave(stack: _Stack) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if stack.fork is not None and module.training:
            stack.fork.leave()
        stack.release(module)
        if isinstance(output, tuple):
            return (stack.gather(output[0]), *output[1:])
        return stack.gather(output)

    return hook


def _join(stack: _Stack, layer: nn.Module) -> None:
    """Let a column take the part and give all rows, and a row take all rows and give the part."""
    is_row = isinstance(layer, RowParallelLinear)
    flat = False

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal flat
        (x,) = args
        stack.release(module)
        extra = {"shard_sizes": stack.sizes} | ({} if is_row else {"source": x})
        flat = x.dim() == 2
        if isinstance(x, DTensor):
            x = stack.part(x)
        elif flat:
            x = x.view(*stack.shape[:2], x.shape[-1])
        return (x,), {**kwargs, **extra}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        if is_row:
            stack.hold(module)
        y: Tensor = stack.wrap(output) if is_row and not isinstance(output, PendingSum) else output
        return y.reshape(-1, y.shape[-1]) if flat else y

    assert isinstance(layer, RowParallelLinear | PackedColumnParallelLinear | CopiedHeadsLinear | nn.Module)
    if isinstance(layer, RowParallelLinear) and layer.followed_by is not None:
        layer.followed_by.sequence = stack
    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)


def _keep_local(stack: _Stack, module: nn.Module) -> None:
    """Let a norm, or dropout, work on the part as it would on the whole."""
    flat: list[bool | None] = []
    rank = stack.mesh.get_local_rank()

    def local(x: DTensor) -> Tensor:
        part = stack.part(x)
        part = part.flatten(0, 1) if stack.is_flat(x) else part
        hand_on(module, x, part)
        return part

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        flat.append(stack.is_flat(given[0]) if given else None)
        return tree_map_only(DTensor, local, (args, kwargs))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        was_flat = flat.pop()

        def whole(part: Tensor) -> Tensor:
            y = stack.wrap(part.unflatten(0, (stack.shape[0], stack.sizes[rank])) if was_flat else part)
            return y.reshape(-1, *y.shape[2:]) if was_flat else y

        return output if was_flat is None else tree_map_only(Tensor, whole, output)

    if stack.blocks is not None:
        stack.blocks.install(module)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def _make_whole(stack: _Stack, module: nn.Module) -> None:
    """Let a module that could not be cut work on the whole sequence, with the random numbers that all ranks share."""
    depth: list[bool] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        found: dict[int, Tensor] = {}

        def whole(x: DTensor) -> Tensor:
            if id(x) not in found:  # one gather, and one object, where a tensor is several arguments
                found[id(x)] = stack.gather(x)
            return found[id(x)]

        args, kwargs = tree_map_only(DTensor, whole, (args, kwargs))
        depth.append(bool(found))
        stack.release(module)
        if found and stack.fork is not None and module.training:
            stack.fork.pause()
        return args, kwargs

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not depth.pop():
            return output
        if stack.fork is not None and module.training:
            stack.fork.resume()
        stack.hold(module)
        if isinstance(output, tuple):
            return (stack.cut(output[0]), *output[1:])
        return stack.cut(output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)
