"""Tile and chunk sizes: a pure function of GPU and problem, with a printable answer.

Equal arguments give equal configurations on every rank, which ranks rely on: the chunk count is part of the protocol,
and tile sizes decide the last bits of a result. Numbers here come from arithmetic (shared memory, registers, waves) and
from what compiles without spills (tests/kernels/resources.json). On an H200 no neighbour was faster by more than 1 % in
bf16; in fp8 256 x 128 tiles were, by 2 to 8 %, which `Tiles.refusal` does not admit yet (the set `tiles` of
benchmarks/one_gpu.py). Whoever measures gives his :class:`Tiles`, and the rest follows from them; `candidates` are
those worth measuring.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["DTYPES", "LOOPS", "MAX_REGISTERS", "GemmConfig", "Tiles", "candidates", "configure", "configure_grouped"]

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
PRECISIONS = ("ieee", "tf32", "tf32x3")

# How a CTA goes through its tiles: one loop over tiles and steps along K, or a loop over steps in one over tiles.
LOOPS = ("flat", "nested")

# A CTA is alone on its SM. Unasked, the assembler aims at two and spills for it (sm_100: 48 bytes at 128 registers).
MAX_REGISTERS = 255
STORED_COLUMNS = 64  # of a tile, at a time: what follows the product needs registers beside the sums
# Of all peers together. More hide no more, because one chunk of one of them stays exposed, and each costs a copy and a
# flag. On an H200 with 7 peers behind PCIe and a transfer as long as the GEMM, 2 of each shard took 4 % longer than 1,
# 4 took 9 %, 8 took 20 % and more (the set `link` of benchmarks/one_gpu.py).
MAX_CHUNKS = 8
# A copy of less is dominated by its fixed cost: at 400 GB/s, 256 KiB take 0.7 us, starting the copy 1 to 2 us.
MIN_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Tiles:
    """The part of a configuration that can be measured on one GPU: how large a tile is, and how a CTA works on it.

    Raises:
        ValueError: a number that no kernel can be launched with.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    loop: str = "flat"

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise ValueError(f"loop ({self.loop!r}) must be one of {', '.join(map(repr, LOOPS))}")
        for name, legal in _LEGAL.items():
            value = getattr(self, name)
            if type(value) is not int or value not in legal:
                raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(str, legal))}")

    def refusal(self, capability: int, dtype: str, dual: bool = False) -> str | None:
        """Why a GPU cannot run these, or not without spilling registers; None if it can."""
        weights = 2 if dual else 1
        columns = self.block_n * weights
        # Warps that multiply from registers (mma.sync) have read a stage before they ask for the next.
        stages = self.num_stages if 90 <= capability < 120 else self.num_stages - 1
        num_bytes = (self.block_m + columns) * self.block_k * DTYPES[dtype] * stages
        if self.loop == "flat":  # loads of the next tile fill the stages while this one is stored
            num_bytes += self.block_m * min(self.block_n, STORED_COLUMNS) * 4 + 1024
        limit = 1024 * _shared_kib(capability)
        if num_bytes > limit:
            return f"tiles take {num_bytes} bytes of shared memory, sm_{capability} has {limit}"
        sums, most = self.block_m * columns // (32 * self.num_warps), 16 * weights if dtype == "float32" else 128
        if dtype == "float8_e4m3fn" and 90 <= capability < 100 and not dual:
            most //= 2  # products add up a second time outside of the tensor core; two weights take turns at that
        if sums > most:
            return f"tiles take {sums} sums in a thread's registers, at most {most} of {dtype} products fit"
        return None


_LEGAL = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6),
}


SMALLEST_BLOCK = _LEGAL["block_n"][0]


def _shared_kib(capability: int) -> int:
    """Shared memory that a CTA can have; 86, 89, 120 and 121 have less than the large GPUs of their generation."""
    return 163 if capability in (80, 87) else 227 if 90 <= capability < 120 else 99


def candidates(tiles: Tiles, *, capability: int, dtype: str, dual: bool = False) -> tuple[Tiles, ...]:
    """`tiles`, and those that differ from it by one step in one number, or in the loop, and fit the GPU."""
    found = [tiles]
    for name, legal in _LEGAL.items():
        place = legal.index(getattr(tiles, name))
        for other in legal[max(0, place - 1) : place] + legal[place + 1 : place + 2]:
            changed: dict[str, Any] = {name: other}
            near = replace(tiles, **changed)
            if near.refusal(capability, dtype, dual) is None:
                found.append(near)
    others = (replace(tiles, loop=loop) for loop in LOOPS if loop != tiles.loop)
    found += [other for other in others if other.refusal(capability, dtype, dual) is None]
    return tuple(found)


@dataclass(frozen=True)
class GemmConfig:
    """How a kernel is launched, and how shards are cut.

    num_programs: persistent CTAs; at most one per SM, minus those left to others. num_chunks: of every shard, for
    `partition.chunk_ranges`. descriptors: operands as tensor descriptors (TMA), not pointers. precision: of fp32
    products; "ieee" is full fp32.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    num_programs: int
    num_chunks: int
    descriptors: bool
    precision: str = "ieee"
    loop: str = "flat"

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.block_m, self.block_n, self.block_k, self.num_warps, self.num_stages, self.loop)


def configure(
    *,
    capability: int,
    num_sms: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    world_size: int,
    moved_row_bytes: int,
    dual: bool = False,
    pointers: bool = False,
    allow_tf32: bool = False,
    reserved_sms: int = 0,
    tiles: Tiles | None = None,
) -> GemmConfig:
    """The configuration of one fused GEMM.

    capability: 80, 90, 100, ...; m, n, k: of this rank's GEMM, m over all ranks; moved_row_bytes: bytes of one row that
    travel (K of the gathered input, N of the partial sums); dual: two weights at once (gated activations); pointers:
    the operands do not fit descriptors (`operands.descriptors_fit`), as a weight that is contiguous along N;
    reserved_sms: left to reducers or collectives that run at the same time; tiles: measured ones, instead of those of
    this function.

    Raises:
        ValueError: no such dtype, or one that the GPU does not have; tiles that it cannot run.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be one of {', '.join(map(repr, DTYPES))}")
    if capability < 80 or (dtype == "float8_e4m3fn" and capability < 89):
        raise ValueError(
            f"{dtype} needs capability {89 if dtype.startswith('float8') else 80} or more, got {capability}"
        )
    if min(m, n, k) < 0 or world_size < 1 or not 0 <= reserved_sms < num_sms:
        raise ValueError(
            f"m, n, k ({m}, {n}, {k}) must be at least 0, world_size ({world_size}) at least 1 and reserved_sms "
            f"({reserved_sms}) below num_sms ({num_sms})"
        )
    shard = -(-m // world_size)
    descriptors = not pointers and capability >= 90 and dtype != "float32" and k > 0 and k * DTYPES[dtype] % 16 == 0
    if tiles is None:
        tiles = _tiles(capability, shard, n, dtype, dual, descriptors)
    elif refusal := tiles.refusal(capability, dtype, dual):
        raise ValueError(f"{tiles}: {refusal}")
    num_programs = num_sms - reserved_sms
    most = max(1, MAX_CHUNKS // max(1, world_size - 1))
    num_chunks = _num_chunks(shard, n, tiles.block_m, tiles.block_n, num_programs, moved_row_bytes, most)
    return GemmConfig(
        **asdict(tiles),
        # A group that ends with its chunk waits for no later one.
        group_m=max(1, min(8, -(-shard // num_chunks) // tiles.block_m)),
        num_programs=num_programs,
        num_chunks=num_chunks,
        descriptors=descriptors,
        precision="tf32" if allow_tf32 and dtype == "float32" else "ieee",
    )


def configure_grouped(
    *,
    capability: int,
    num_sms: int,
    tokens: int,
    top_k: int,
    experts: int,
    n: int,
    k: int,
    dtype: str,
    world_size: int,
    moved_row_bytes: int,
    dual: bool = False,
    allow_tf32: bool = False,
    reserved_sms: int = 0,
    tiles: Tiles | None = None,
) -> GemmConfig:
    """The configuration of one grouped GEMM over the tokens of all ranks, each of which has top_k of the experts.

    Tiles are as high as an expert's rows of one shard suggest, if tokens choose their experts by chance. A further
    chunk of a shard reads the weights of its experts again, so there are several only where these rows fill a tile in
    each. world_size: 1 where the kernel begins when all tokens are there, and chunks do not matter. tiles: as of
    `configure`.

    Raises:
        ValueError: as `configure`.
    """
    rows = -(-tokens * top_k // max(1, experts))
    found = configure(
        capability=capability, num_sms=num_sms, m=rows, n=n, k=k, dtype=dtype, world_size=world_size,
        moved_row_bytes=moved_row_bytes, dual=dual, pointers=True, allow_tf32=allow_tf32, reserved_sms=reserved_sms,
        tiles=tiles,
    )  # fmt: skip
    shard, shard_rows, num_chunks = -(-tokens // world_size), -(-rows // world_size), 1
    for count in range(2, MAX_CHUNKS // max(1, world_size - 1) + 1):
        if shard // count * moved_row_bytes < MIN_CHUNK_BYTES or shard_rows // count < found.block_m:
            break
        num_chunks = count
    group_m = max(1, min(8, shard_rows // num_chunks // found.block_m))
    return replace(found, loop="nested", num_chunks=num_chunks, group_m=group_m)


def _tiles(capability: int, shard: int, n: int, dtype: str, dual: bool, descriptors: bool) -> Tiles:
    """With four stages, or as many as shared memory has room for."""
    # Two sums in one flat loop: the assembler of sm_90 waits for each product (ptxas 12.9 says C7515).
    loop = "nested" if dual and 90 <= capability < 100 else "flat"
    tiles = Tiles(*_sizes(capability, shard, n, dtype, dual, descriptors), num_stages=4, loop=loop)
    while tiles.num_stages > 2 and tiles.refusal(capability, dtype, dual) is not None:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def _sizes(capability: int, shard: int, n: int, dtype: str, dual: bool, descriptors: bool) -> tuple[int, int, int, int]:
    """block_m, block_n, block_k, num_warps."""
    if dtype == "float32":  # without tensor cores: registers hold the operands, larger tiles spill
        return (64 if shard > 32 else 32), 64, 32, 8
    block_k = 128 if dtype == "float8_e4m3fn" else 64
    if shard <= 16:
        return 16, 32 if dual else 64, 2 * block_k, 4  # the weight is read once, by as many CTAs as there can be
    if shard <= 64 or n <= 64:
        return 64, 64 if dual else 128, block_k, 4
    if 90 <= capability < 120:  # 120 and 121, like 86 and 89, have 99 KiB of shared memory, not 163 or more
        # One accumulator of 128 x 256 in fp32 is 128 registers a thread with 8 warps; two weights share that budget.
        # So do fp8 products on sm_90, which add up a second time outside of the tensor core, and pointers to operands.
        halved = dual or n <= 128 or not descriptors or (dtype == "float8_e4m3fn" and capability < 100)
        return 128, 128 if halved else 256, block_k, 8
    return 128, 64 if dual else 128, block_k, 8


def _num_chunks(shard: int, n: int, block_m: int, block_n: int, num_programs: int, row_bytes: int, most: int) -> int:
    """As many chunks of a shard, up to `most`, as feed whole waves of CTAs: then a wave seldom waits for two of them.

    A chunk must carry MIN_CHUNK_BYTES and have a tile for every CTA. Of those counts the largest is taken that leaves
    less than a tenth of the CTA time of its waves idle and adds less than a tenth to the number of tiles (a chunk ends
    with a tile that may not be full); where none does, the one that loses least.
    """
    shard_tiles, column_tiles = max(1, -(-shard // block_m)), max(1, -(-n // block_n))
    best, least = 1, math.inf
    for count in range(1, most + 1):
        rows = -(-shard // count)
        row_tiles = -(-rows // block_m)
        tiles = row_tiles * column_tiles
        if count > 1 and (tiles < num_programs or rows * row_bytes < MIN_CHUNK_BYTES):
            break
        in_waves = -(-tiles // num_programs) * num_programs
        loss = max(in_waves / max(1, tiles), count * row_tiles / shard_tiles) - 1
        if loss < 0.1 or loss < least:
            best, least = count, max(loss, 0.1)
    return best
