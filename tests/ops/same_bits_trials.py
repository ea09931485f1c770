"""Random shapes by the thousand: `same_bits=8` at 1, 2, 4 and 8 ranks, by every implementation.

    python -m tests.ops.same_bits_trials --shapes 10000 --json benchmarks/results/FILE.json
    python -m tests.ops.same_bits_trials --only 7000123          # one shape, by its own seed

A shape is a call of an op with a GEMM (four dense ones, the four with experts), forward and backward, or a layer of
sizes that do not divide into blocks.  The ranks stay, and get so many shapes at a time; each says of its part of every
result what its digest is, and one process alone says what it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kept_mesh import once_per_pool
from tests.nn import uneven_layers
from tests.ops import same_bits, test_same_bits_experts
from tests.ops.same_bits import SAME_BITS, Cut, Result, bits, part
from tests.ops.support import IMPLEMENTATIONS
from tests.ops.test_same_bits_experts import Mixture
from tpkernels.comm.groups import resolve
from tpkernels.gemm import fp8
from tpkernels.measure import report
from tpkernels.testing.spawn import Pools, RanksFailed

DEGREES = (1, 2, 4, 8)
BATCH = 240
"""Shapes between two groups of ranks."""
Shape = same_bits.Draw | Mixture | uneven_layers.Draw
Found = dict[int, list[tuple[str, Any]]]
"""By seed, of each result: its name, and its digest on this rank; on one process alone those of all ranks by degree."""


def draw(seed: int) -> Shape:
    """Of six shapes three are dense ops, two are experts and one is a layer."""
    if seed % 6 < 3:
        return same_bits.draw(seed)
    return draw_mixture(seed) if seed % 6 < 5 else uneven_layers.draw(seed)


def draw_mixture(seed: int) -> Mixture:
    pick = random.Random(seed)
    experts = pick.choice([1, 2, 3, 4, 7, 20])
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64, fp8.DTYPE])
    along = pick.random() < 0.5
    return Mixture(
        tokens=pick.choice([8, 16, 24, 64, 136] if along else [1, 2, 7, 9, 16, 37, 64, 130]),
        d_model=pick.choice([1, 8, 12, 24, 40, 65]),
        block=pick.choice([1, 2, 3, 5, 8, 9, 16, 17]),
        num_experts=experts,
        top_k=pick.randint(1, min(3, experts)),
        activation=pick.choice(["swiglu", "geglu", *([] if dtype == fp8.DTYPE else ["gelu"])]),
        bias=pick.random() < 0.5,
        sequence_parallel=along,
        dtype=dtype,
    )


def implementation_of(seed: int, world: int) -> str:
    """Another one at the next degree, and for the next shape; alone there is one."""
    if world == 1:
        return "unfused"
    return IMPLEMENTATIONS[(seed + world.bit_length()) % len(IMPLEMENTATIONS)]


@once_per_pool
def kept_group() -> Any:
    """One that stays: DTensors of one process remember the groups of meshes that are equal."""
    group = dist.new_group()
    resolve(group).keep_same_bits(SAME_BITS)
    return group


def run(seeds: Sequence[int], fault: str | None = None) -> Found:
    """On every rank; ``fault``: one of :data:`tests.ops.same_bits.FAULTS`."""
    world, found, group = dist.get_world_size(), Found(), kept_group()
    for implementation in IMPLEMENTATIONS:
        with pytest.MonkeyPatch.context() as patch, same_bits.seeded(fault):
            if implementation == "chunked":
                patch.setenv("TPKERNELS_NUM_CHUNKS", str(2 + seeds[0] % 4))
            for seed in seeds:
                if implementation_of(seed, world) == implementation:
                    try:
                        results = results_of(draw(seed), group, implementation)
                    except Exception as error:
                        raise RuntimeError(f"{told(seed)} on {world} ranks by {implementation}") from error
                    found[seed] = [(name, digests(cut, value)) for name, cut, value in results]
    return found


def results_of(shape: Shape, group: Any, implementation: str) -> list[Result]:
    if isinstance(shape, same_bits.Draw):
        return same_bits.run(shape, group, implementation)
    if isinstance(shape, Mixture):
        return test_same_bits_experts.run(shape, group, implementation)
    return [(name, "same", value) for name, value in uneven_layers.run(shape, dist.get_world_size(), group).items()]


def digests(cut: Cut, value: Tensor) -> Any:
    if dist.get_world_size() > 1:
        return digest(value)
    return {world: [digest(part(value, cut, rank, world)) for rank in range(world)] for world in DEGREES}


def digest(value: Tensor) -> str:
    return hashlib.blake2b(bits(value).numpy().tobytes() + str(value.dtype).encode(), digest_size=12).hexdigest()


def told(seed: int) -> str:
    return f"shape {seed}: {draw(seed)}"


@dataclass
class Summary:
    """What was compared."""

    shapes: int = 0
    results: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    implementations: Counter[str] = field(default_factory=Counter)
    """At 2, 4 and 8 ranks; layers choose their own."""
    differences: list[str] = field(default_factory=list)

    def add(self, seed: int, results: int) -> None:
        shape = draw(seed)
        self.shapes += 1
        self.results += results
        self.dtypes[str(shape.dtype).removeprefix("torch.")] += 1
        if isinstance(shape, Mixture):
            along = ("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter")
            whole = ("copy_grouped_matmul", "grouped_matmul_all_reduce")
            self.kinds.update(along if shape.sequence_parallel else whole)
        else:
            self.kinds[shape.op if isinstance(shape, same_bits.Draw) else f"layer: {shape.kind}"] += 1
        if not isinstance(shape, uneven_layers.Draw):
            self.implementations.update(f"{implementation_of(seed, world)} on {world}" for world in DEGREES[1:])


def compare(
    pools: Pools, seeds: Sequence[int], summary: Summary, *, largest: int = SAME_BITS, fault: str | None = None
) -> None:
    """Run these shapes at every degree up to the ``largest``, and note each part of a result that differs.

    ``fault``: on several ranks.
    """
    timeout = 60.0 + 4 * len(seeds)
    (expected,) = pools(1).run(run, seeds, timeout=timeout)
    for world in (degree for degree in DEGREES[1:] if degree <= largest):
        for rank, found in enumerate(pools(world).run(run, seeds, fault, timeout=timeout)):
            for seed in seeds:
                for (name, mine), (_, by_degree) in zip(found[seed], expected[seed], strict=True):
                    if mine != by_degree[world][rank]:
                        where = f"{name} on rank {rank} of {world} by {implementation_of(seed, world)}"
                        summary.differences.append(f"{told(seed)}: {where}")
    for seed in seeds:
        summary.add(seed, len(expected[seed]))


def compare_all(pools: Pools, seeds: Sequence[int]) -> Iterator[Summary]:
    """What was found so far, batch by batch; a batch of which a shape raised counts as a difference."""
    summary = Summary()
    for first in range(0, len(seeds), BATCH):
        try:
            compare(pools, seeds[first : first + BATCH], summary)
        except RanksFailed as error:
            summary.differences.append(str(error))
        yield summary


def seeds_of(run: int, count: int) -> range:
    """Of the shapes of one run."""
    return range(run * 1_000_000, run * 1_000_000 + count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="of the run (by default a fresh one, which is printed)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="shapes by their own seeds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    number = secrets.randbelow(1000) if given.seed is None else given.seed
    seeds = given.only or seeds_of(number, given.shapes)
    if not given.only:
        print(f"{len(seeds)} shapes, run {number}: --seed {number} repeats it", flush=True)
    pools, start = Pools(limit=len(DEGREES), forked=True, environment={"TPKERNELS_CALIBRATE": "0"}), time.monotonic()
    told_before = 0
    try:
        for summary in compare_all(pools, seeds):
            for difference in summary.differences[told_before:]:
                print(difference, flush=True)
            told_before, seconds = len(summary.differences), time.monotonic() - start
            print(
                f"{summary.shapes} shapes, {summary.results} results, {told_before} differ, {seconds:.0f} s", flush=True
            )
            if given.json:
                setup = {"degrees": DEGREES, "same_bits": SAME_BITS, "threads": 1, "seed": number}
                content = {
                    **report.describe_environment(setup | {"seconds": round(seconds)}),
                    "results": [vars(summary)],
                }
                given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    finally:
        pools.close()
    return int(told_before > 0)


if __name__ == "__main__":
    sys.exit(main())
