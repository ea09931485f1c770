"""What random models are made of: kinds of blocks and of ops, by name.

An op keeps the shape of what it works on, so that any sequence of ops is a model.  ``features`` ops see
``[batch, length, features]``, ``heads`` ops the same features as heads, in one of two layouts; a block sees and gives
``[batch, length, width]``.  What an op is called with besides is ``whole``, the input of the block that it stands in,
which no rank has a part of: ops that mix the two are where naive cuts go wrong.

A kind draws its own options.  Options are data (numbers, strings, lists of ops), and each has a default, so that a
failing model can be made smaller by leaving options out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

__all__ = ["BLOCKS", "FEATURES", "HEADS", "Apply", "Op", "Ops", "Sizes", "Spec", "block", "draw_ops", "function", "op"]

Spec = dict[str, Any]
"""A kind and its options."""


@dataclass(frozen=True)
class Sizes:
    """Of what a block or an op works on."""

    batch: int
    length: int
    width: int
    features: int = 0
    heads: int = 0
    layout: str = "bshd"
    """Of heads: batch, sequence, heads, features of a head; or "bhsd"."""

    @property
    def head_dim(self) -> int:
        return self.features // self.heads

    @property
    def at(self) -> int:
        """The dimension of heads."""
        return self.layout.index("h")

    def of(self, features: int, heads: int = 0, layout: str = "bshd") -> Sizes:
        return replace(self, features=features, heads=heads, layout=layout)


class Op(nn.Module):
    """The base of all ops and blocks; most have no options."""

    trap = False
    """Whether most cuts of what it works on would be wrong."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    @staticmethod
    def draw(rng: random.Random, sizes: Sizes) -> Spec | None:
        """Options, or None where the sizes do not allow the kind."""
        return {}


FEATURES: dict[str, type[Op]] = {}
HEADS: dict[str, type[Op]] = {}
BLOCKS: dict[str, type[Op]] = {}


def op(table: dict[str, type[Op]], name: str, *, trap: bool = False) -> Callable[[type[Op]], type[Op]]:
    def add(kind: type[Op]) -> type[Op]:
        assert name not in table, name
        table[name] = kind
        kind.trap = trap
        return kind

    return add


def block(name: str) -> Callable[[type[Op]], type[Op]]:
    return op(BLOCKS, name)


class Apply(Op):
    """An op that is a function of its input and of the whole."""

    run: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        return type(self).run(x, whole)


def function(
    table: dict[str, type[Op]], name: str, run: Callable[..., Tensor], *, trap: bool = False, needs: str = ""
) -> None:
    """Add a function of (x, whole); of (x, whole, dimension of heads) for heads.  ``needs``: "even" features."""

    def draw(rng: random.Random, sizes: Sizes) -> Spec | None:
        size = sizes.head_dim if sizes.heads else sizes.features
        return None if needs == "even" and size % 2 else {}

    if table is HEADS:

        def init(self: Any, sizes: Sizes) -> None:
            nn.Module.__init__(self)
            self.at = sizes.at

        def forward(self: Any, x: Tensor, whole: Tensor) -> Tensor:
            return run(x, whole, self.at)

        members: dict[str, Any] = {"__init__": init, "forward": forward}
    else:
        members = {"run": staticmethod(run)}
    members |= {"draw": staticmethod(draw), "__module__": __name__}
    op(table, name, trap=trap)(type(name.title().replace("_", ""), (Apply,), members))


class Ops(nn.Module):
    """Ops one after the other."""

    def __init__(self, table: dict[str, type[Op]], sizes: Sizes, specs: list[Spec]) -> None:
        super().__init__()
        self.items = nn.ModuleList(build(table, sizes, spec) for spec in specs)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        for item in self.items:
            x = item(x, whole)
        return x


def build(table: dict[str, type[Op]], sizes: Sizes, spec: Spec) -> Op:
    options = {key: value for key, value in spec.items() if key != "is"}
    return table[spec["is"]](sizes, **options)


def draw_ops(table: dict[str, type[Op]], rng: random.Random, sizes: Sizes, most: int, traps: float) -> list[Spec]:
    """Up to ``most`` ops, each a trap with probability ``traps``."""
    found: list[Spec] = []
    for _ in range(rng.randint(0, most)):
        wanted = rng.random() < traps
        name = rng.choice([name for name, kind in table.items() if kind.trap == wanted])
        options = table[name].draw(rng, sizes)
        if options is not None:
            found.append({"is": name, **options})
    return found
