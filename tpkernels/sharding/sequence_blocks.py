"""A sequence that is cut, in the same blocks at every tensor-parallel degree: what ``same_bits`` does with it.

The sequence has ``same_bits`` blocks of one length, of which a rank has consecutive ones.  A module that works on a
part of the sequence (a norm, dropout) runs once for each block::

    y[:, b] = module(x[:, b])        dw = tree over b of dw[b]        mask[:, b] = bernoulli(1 - p; seed(shared, b))

so that the gradient of its parameters is a sum of as many terms in the same order at every degree, and its random
numbers are those of blocks.  The shared seed is drawn from the generator that all ranks have in common, in every pass.

Nothing else may draw random numbers while the sequence is cut: the default generator must be at each layer where it was
after the last one (:meth:`SequenceBlocks.hold`, :meth:`SequenceBlocks.release`).

Refuses lengths that do not divide into blocks, and blocks of which vectorised loops would treat some elements in
another way than at another degree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm.canonical import VECTOR
from tpkernels.nn.block_copies import copies_for_blocks
from tpkernels.nn.random import _mix
from tpkernels.nn.replicated import BY_BLOCKS
from tpkernels.sharding.part_tracking import sums_gradient
from tpkernels.sharding.randomness import SEEDS

__all__ = ["SequenceBlocks"]


class SequenceBlocks:
    """The blocks of one list of modules through which a cut sequence runs."""

    def __init__(self, mesh: DeviceMesh, same_bits: int, random: bool) -> None:
        """``random``: modules that run block by block draw random numbers in training."""
        self.mesh, self.same_bits, self.random = mesh, same_bits, random
        self.own = same_bits // mesh.size()
        self.first = mesh.get_local_rank() * self.own
        self.shape: tuple[int, int] = (0, 0)
        self.held: Tensor | None = None
        self._block = 0
        self._copies: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: object) -> SequenceBlocks:
        return self  # as the hooks of a copied model keep the one that they were made with

    def enter(self, x: Tensor) -> None:
        """``x``: the whole residual ``[B, S, ...]`` that is about to be cut.

        Raises:
            ValueError: it does not divide into blocks.
        """
        batch, length = x.shape[:2]
        if length % self.same_bits:
            raise ValueError(f"same_bits={self.same_bits} cuts a sequence into blocks of one length, got {length}")
        count = x.numel() // self.same_bits
        if count % VECTOR:
            raise ValueError(
                f"same_bits={self.same_bits}: a block of the residual {tuple(x.shape)} must be a multiple of {VECTOR} "
                f"elements, got {count}: code may compute the last ones of a tensor in another way"
            )
        self.shape = batch, length // self.mesh.size()

    def hold(self) -> None:
        """From here to :meth:`release` nobody else draws random numbers."""
        self.held = torch.get_rng_state()

    def release(self) -> None:
        """
        Raises:
            UnsupportedProblem: somebody did.
        """
        held, self.held = self.held, None
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing repeats a pass that was checked, and may leave it half-way
        if held is not None and not torch.equal(held, torch.get_rng_state()):
            raise UnsupportedProblem(
                f"same_bits={self.same_bits}: something draws random numbers for a part of the sequence that is not a "
                "module of its own (torch.nn.functional.dropout in the code of a block, for example): use nn.Dropout, "
                "or set its probability to 0"
            )

    def install(self, module: nn.Module) -> None:
        """Let ``module``, which takes parts of the sequence, run block by block."""
        for inner in module.modules():
            inner.__dict__[BY_BLOCKS] = self
        kind: Any = type(module)
        module.__class__ = _by_blocks(kind)

    def run(self, forward: Callable[..., Any], training: bool, args: Any, kwargs: Any) -> Any:
        """``forward`` of each block, put together again."""
        self._copies = {}
        draws, was_held = training and self.random, self.held is not None
        self.release()
        state: Tensor | None = None
        if draws:
            seed = int(torch.randint(SEEDS, ()))
            state = torch.get_rng_state()
        outputs = []
        for block in range(self.own):
            self._block = block
            if draws:
                torch.default_generator.manual_seed(_mix(seed, self.first + block))
            taken = tree_map_only(Tensor, self._part, (args, kwargs))
            outputs.append(tree_flatten(forward(*taken[0], **taken[1])))
        if state is not None:
            torch.set_rng_state(state)
        if was_held:
            self.hold()
        self._copies = {}
        leaves = [self._join(parts) for parts in zip(*(of_block for of_block, _ in outputs), strict=True)]
        return tree_unflatten(leaves, outputs[0][1])

    def copy_of(self, parameter: Tensor, local: Tensor) -> Tensor:
        """The local tensor of a parameter, for the block that is running."""
        if not local.requires_grad or not torch.is_grad_enabled():
            return local
        if id(parameter) not in self._copies:
            self._copies[id(parameter)] = copies_for_blocks(local, self.mesh, self.own)
            sums_gradient(self._copies[id(parameter)])
        return self._copies[id(parameter)][self._block]

    def _part(self, x: Tensor) -> Tensor:
        length = self.shape[1] // self.own
        if tuple(x.shape[:2]) == self.shape and x.dim() > 2:
            return x.narrow(1, self._block * length, length)
        if x.dim() > 1 and x.shape[0] == self.shape[0] * self.shape[1]:
            rows = x.view(*self.shape, *x.shape[1:])
            return rows.narrow(1, self._block * length, length).flatten(0, 1)
        raise UnsupportedProblem(
            f"same_bits={self.same_bits}: a module works on a part of the sequence, {list(self.shape)} tokens, and on "
            f"a tensor of shape {tuple(x.shape)}, of which no blocks are known"
        )

    def _join(self, parts: tuple[Any, ...]) -> Any:
        first = parts[0]
        if not isinstance(first, Tensor):
            return first
        length = self.shape[1] // self.own
        if first.dim() > 2 and tuple(first.shape[:2]) == (self.shape[0], length):
            return torch.cat(parts, 1)
        return torch.cat([part.unflatten(0, (self.shape[0], length)) for part in parts], 1).flatten(0, 1)


@lru_cache(maxsize=256)
def _by_blocks(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        blocks: SequenceBlocks = self.__dict__[BY_BLOCKS]
        return blocks.run(lambda *some, **named: cls.forward(self, *some, **named), self.training, args, kwargs)

    members = {
        "forward": forward,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__qualname__": cls.__qualname__,
    }
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))
