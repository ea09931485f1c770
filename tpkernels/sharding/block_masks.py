"""Dropout on parts whose masks are the same at every tensor-parallel degree: what ``same_bits`` drops out.

Between a column layer and the row layer that ends its group a rank has some of the ``same_bits`` blocks of the hidden
features.  Each block's mask is drawn from a seed of its own, made from one that all ranks draw from their common
stream, the number of the call in between and the number of the block among all blocks::

    mask[..., b] = bernoulli(1 - p; seed(shared, call, b)) / (1 - p)        y = x * mask

The seed is drawn anew in every pass, so activation checkpointing, which sets the generator back, draws it again.

Only ``nn.Dropout`` on tensors of the shape of the column layer's output is known to have its features last.  All else
in between that draws random numbers, such as dropout of attention's probabilities, raises: the default generator must
be at the row layer where it was after the column layer.  A region that activation checkpointing left half-way is told
by its generator, too: it stands elsewhere.

A plan that was written by hand does not say which layers belong together.  Under it every draw between a column layer
and the next row layer raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.errors import UnsupportedProblem
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.random import _mix
from tpkernels.sharding.part_tracking import cut_alike
from tpkernels.sharding.randomness import SEEDS

__all__ = ["Region", "drop_by_blocks", "refuse_draws"]


class Region:
    """From the end of ``opener`` to the start of ``closer``, in training."""

    def __init__(self, name: str, mesh: DeviceMesh, blocks: int, widths: Sequence[int] | None) -> None:
        """``name``: for messages; ``blocks``: this rank's; ``widths``: of them, where they are not all
        alike; None: they do not follow each other."""
        self.name, self.blocks, self.first = name, blocks, mesh.get_local_rank() * blocks
        self.widths = widths
        self.shape = torch.Size()
        self.seed, self.calls = 0, 0
        self.state: Tensor | None = None

    def __deepcopy__(self, memo: object) -> Region:
        return self  # as the hooks of a copied model keep the one that they were made with

    @property
    def is_open(self) -> bool:
        """Whether a call now is in between."""
        return self.state is not None and torch.equal(self.state, torch.get_rng_state())

    def open(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook after ``opener``."""
        if module.training:
            self.seed, self.calls, self.shape = int(torch.randint(SEEDS, ())), 0, output.shape
            self.state = torch.get_rng_state()

    def close(self, module: nn.Module, args: Any) -> None:
        """A hook before ``closer``.

        Raises:
            UnsupportedProblem: something in between drew random numbers.
        """
        drew, self.state = self.state is not None and not self.is_open, None
        if module.training and drew:
            raise UnsupportedProblem(
                f"same_bits: between {self.name} something draws random numbers that is not nn.Dropout of the hidden "
                "features (dropout of attention's probabilities, for example): set its probability to 0"
            )

    def drop(self, x: Tensor, p: float, inplace: bool) -> Tensor:
        """``nn.Dropout`` of this rank's part.

        Raises:
            UnsupportedProblem: it is not known where its features are.
        """
        if x.shape != self.shape or self.widths is None:
            raise UnsupportedProblem(
                f"same_bits: between {self.name} there is dropout of a tensor of shape {tuple(x.shape)}, whose blocks "
                f"are known for the shape of the first layer's output alone, {tuple(self.shape)}: set its probability "
                "to 0"
            )
        seed, generator = _mix(self.seed, self.calls), torch.Generator()
        self.calls += 1
        masks = [
            torch.empty(*x.shape[:-1], width, dtype=x.dtype).bernoulli_(
                1 - p, generator=generator.manual_seed(_mix(seed, self.first + block))
            )
            for block, width in enumerate(self.widths or (x.shape[-1] // self.blocks,) * self.blocks)
        ]
        mask = torch.cat(masks, -1).div_(1 - p if p < 1 else 1)
        cut_alike(mask, x)
        return x.mul_(mask) if inplace else x * mask


class _Draws:
    """Whether random numbers were drawn since the last column layer, in training."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def __deepcopy__(self, memo: object) -> _Draws:
        return self

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook after a column layer."""
        self.state = torch.get_rng_state() if module.training else None

    def check(self, module: nn.Module, args: Any) -> None:
        """A hook before a row layer.

        Raises:
            UnsupportedProblem: something drew.
        """
        state, self.state = self.state, None
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            raise UnsupportedProblem(
                "same_bits: between a column layer and a row layer of a plan written by hand something draws random "
                'numbers (dropout), whose bits would depend on the degree: set its probability to 0, or use plan="auto"'
            )


def refuse_draws(columns: Sequence[nn.Module], rows: Sequence[nn.Module]) -> None:
    """Refuse, in each call, random numbers that are drawn on parts, where it is not known of which features."""
    draws = _Draws()
    for module in columns:
        module.register_forward_hook(draws.watch)
    for module in rows:
        module.register_forward_pre_hook(draws.check)


class _BlockDropout(nn.Dropout):
    regions: Sequence[Region] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.p:
            for region in self.regions:
                if region.is_open:
                    return region.drop(x, self.p, self.inplace)
        return super().forward(x)


def _widths_of(opener: nn.Module) -> Sequence[int] | None:
    if isinstance(opener, PackedColumnParallelLinear):
        return None
    return cast(ColumnParallelLinear | CopiedHeadsLinear, opener).block_widths()


def drop_by_blocks(
    model: nn.Module, modules: dict[str, nn.Module], pairs: Sequence[tuple[str, str]], mesh: DeviceMesh, same_bits: int
) -> None:
    """Let dropout between the layers of each pair draw its masks by blocks; ``modules``: the model's, by name."""
    regions = []
    for opener, closer in pairs:
        region = Region(f"{opener!r} and {closer!r}", mesh, same_bits // mesh.size(), _widths_of(modules[opener]))
        modules[opener].register_forward_hook(region.open)
        modules[closer].register_forward_pre_hook(region.close)
        regions.append(region)
    for module in model.modules() if regions else ():
        if type(module) is nn.Dropout:
            module.__class__ = _BlockDropout
            module.regions = regions  # type: ignore[assignment]
