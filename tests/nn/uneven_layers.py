"""Random layers whose sizes do not divide into the blocks of `same_bits`, run at any degree and put together again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpkernels as tpk
from tests.kept_mesh import once_per_pool
from tests.ops.same_bits import assert_same
from tpkernels.comm.groups import resolve
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.gathering import gathered
from tpkernels.selftest.same_bits import degrees_of, groups_of_degrees
from tpkernels.state.originals import keys_of

SAME_BITS = 8
KINDS = ("column", "row", "split", "packed", "gated", "copied", "table")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


@once_per_pool
def groups() -> dict[int, dist.ProcessGroup]:
    found = groups_of_degrees(degrees_of(dist.get_world_size(), SAME_BITS), 60.0)
    for group in found.values():
        resolve(group).keep_same_bits(SAME_BITS)
    return found


@dataclass(frozen=True)
class Draw:
    """One layer of `units` times `unit` features that are cut, and `width` that are not."""

    kind: str
    units: int
    unit: int
    width: int
    rows: int
    dtype: torch.dtype
    bias: bool
    integers: bool
    """Of which every sum is exact."""
    seed: int

    @property
    def total(self) -> int:
        return self.units * self.unit


def draw(seed: int) -> Draw:
    pick = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    few, some, many = [1, 3, 5, 7], [9, 10, 11, 12, 13, 15, 17, 20], [28, 31, 41, 100]
    units = pick.choice([*(few if kind != "copied" else []), *some, *(many if kind != "packed" else [])])
    unit = 1 if kind in ("gated", "table") else 64 if kind == "packed" else pick.choice([1, 2, 3, 4, 8, 16])
    return Draw(
        kind, units, unit, pick.choice([1, 2, 5, 8, 24, 33]), 64 * pick.choice([1, 1, 2, 9]), pick.choice(DTYPES),
        pick.random() < 0.5, pick.random() < 0.3, seed,
    )  # fmt: skip


def numbers(of: Draw, name: str, shape: Sequence[int]) -> Tensor:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(of.seed * 1000 + sum(map(ord, name)))
    if of.integers:
        return torch.randint(-2, 3, tuple(shape), generator=generator).to(of.dtype)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of.dtype)


def linear(of: Draw, name: str, inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, of.bias, dtype=of.dtype)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            parameter.copy_(numbers(of, f"{name} {key}", parameter.shape))
    return made


def layer_of(of: Draw, group: Any) -> tuple[nn.Module, nn.Module]:
    """A plain layer, and the same cut."""
    kind, width, total = of.kind, of.width, of.total
    if kind == "table":
        table = nn.Embedding(total, width, dtype=of.dtype, padding_idx=total // 2)
        with torch.no_grad():
            table.weight.copy_(numbers(of, "table", table.weight.shape))
        return table, tpk.nn.VocabParallelEmbedding.from_embedding(table, group)
    if kind in ("row", "split"):
        plain = linear(of, "row", total, width)
        return plain, tpk.nn.RowParallelLinear.from_linear(plain, group, unit=of.unit, split_input=kind == "split")
    if kind == "gated":
        both = nn.ModuleDict({name: linear(of, name, width, total) for name in ("gate", "up")})
        linears: Any = dict(both.items())
        return both, tpk.nn.ColumnParallelLinears.from_linears(linears, group, activation="swiglu")
    if kind == "copied":
        heads = next(number for number in (5, 3, 2, 1) if of.units % number == 0)
        plain = linear(of, "copied", width, heads * of.unit)
        return plain, CopiedHeadsLinear.from_linear(plain, group, heads=heads, copies=of.units)
    plain = linear(of, "column", width, (2 if kind == "packed" else 1) * total)
    if kind == "packed":
        segments = total, total
        return plain, tpk.nn.PackedColumnParallelLinear.from_linear(
            plain, group, segments=segments, units=(of.unit, of.unit)
        )
    return plain, tpk.nn.ColumnParallelLinear.from_linear(plain, group, unit=of.unit)


def sizes_of(of: Draw, layer: Any, degree: int) -> tuple[int, ...]:
    """Each rank's features of what the layer gives or takes, of one segment."""
    if of.kind == "copied":
        blocks = layer.blocks
        return (of.total // degree,) * degree if blocks is None else cast("tuple[int, ...]", blocks.sizes(degree))
    inner = layer.layers[0] if of.kind in ("gated", "packed") else layer
    return cast("tuple[int, ...]", inner.shard_sizes)


def run(of: Draw, degree: int, group: Any = None) -> dict[str, Tensor]:
    """What the layer gives at a degree, forward and backward; whole.

    ``group``: of so many ranks; by default one that stays.
    """
    group = groups()[degree] if group is None else group
    rank, (plain, layer) = dist.get_rank(group), layer_of(of, group)
    sizes = sizes_of(of, layer, degree)
    segments = 2 if of.kind == "packed" else 1

    def part(x: Tensor) -> Tensor:
        runs = [one.split(sizes, 1)[rank] for one in x.chunk(segments, 1)]
        return torch.cat(runs, 1)

    def whole(x: Tensor) -> Tensor:
        own = [tpk.all_gather(one, group, dim=1, shard_sizes=sizes) for one in x.chunk(segments, 1)]
        return torch.cat(own, 1)

    cuts_input, cuts_output = of.kind == "row", of.kind in ("column", "packed", "gated", "copied")
    if of.kind == "table":
        x = torch.randint(of.total, (of.rows,), generator=torch.Generator().manual_seed(of.seed))
    else:
        x = numbers(of, "x", (of.rows, of.total if of.kind in ("row", "split") else of.width))
    given = part(x) if cuts_input else x
    leaf = given.clone().requires_grad_() if x.is_floating_point() else x
    y = layer(leaf)
    features = of.total * segments if cuts_output else of.width
    dy = numbers(of, "dy", (of.rows, features))
    y.backward(part(dy) if cuts_output else dy)
    found = {"y": whole(y.detach()) if cuts_output else y.detach()}
    if leaf.grad is not None:
        found["dx"] = whole(leaf.grad) if cuts_input else leaf.grad
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient of {name}"] = gathered(parameter.grad)
    for name, one in keys_of(layer)[0].items():
        assert_same(one.whole(), held(plain)[name], f"{name} of {of}")
    if of.integers and of.kind not in ("gated", "copied") and degree == 1:
        check_values(of, plain, x, dy, found)
    return found


def held(plain: nn.Module) -> dict[str, Tensor]:
    return dict(plain.state_dict())


def check_values(of: Draw, plain: nn.Module, x: Tensor, dy: Tensor, found: dict[str, Tensor]) -> None:
    """Integers, exactly; bf16 rounds each block's product, which may be larger than it holds."""
    if of.dtype == torch.bfloat16:
        return
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    expected = plain(leaf)
    expected.backward(dy)
    assert torch.equal(found["y"], expected.detach()), of
    if leaf.grad is not None:
        assert torch.equal(found["dx"], leaf.grad), of


def differing(draws: Sequence[Draw], fault: AbstractContextManager[None] | None = None) -> list[str]:
    """What is not the same at every degree, on this rank."""
    wrong: list[str] = []
    with fault or nullcontext():
        for of in draws:
            expected = run(of, 1)
            for degree in list(groups())[1:]:
                for name, value in run(of, degree).items():
                    try:
                        assert_same(value, expected[name], f"{name} on {degree} ranks, {of}")
                    except AssertionError as error:
                        wrong.append(str(error))
    return wrong
