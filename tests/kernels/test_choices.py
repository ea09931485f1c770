"""The pure functions behind a launch: tile and chunk sizes, the order of tiles, checks of operands."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from tpkernels.kernels.config import DTYPES, MAX_CHUNKS, MIN_CHUNK_BYTES, GemmConfig, Tiles, candidates, configure
from tpkernels.kernels.operands import (
    check_operands,
    is_transposed,
    loop_of,
    result_descriptor,
    scale_kind,
    weight_descriptor_fits,
)
from tpkernels.kernels.schedule import FIELDS, all_gather_order, as_table, reduce_scatter_order
from tpkernels.partition import chunk_ranges, offsets

pytestmark = pytest.mark.cpu

SIZES = {"m": 8192, "n": 3584, "k": 8192, "world_size": 8}
H100 = {"capability": 90, "num_sms": 132, "dtype": "bfloat16", "moved_row_bytes": 16384}


def config(**options: Any) -> GemmConfig:
    return configure(**{**SIZES, **H100, **options})


# ---------------------------------------------------------------- order

shards = st.lists(st.integers(0, 70), min_size=1, max_size=5)


@given(shards, st.integers(1, 5), st.integers(1, 33), st.data())
def test_every_row_is_in_one_tile_and_no_tile_in_two_chunks(
    rows: list[int], count: int, tile: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(rows) - 1))
    for order in (all_gather_order(rows, count, tile, rank), reduce_scatter_order(rows, count, tile, rank)):
        covered = sorted(row for t in order for row in range(t.row, t.row + t.rows))
        assert covered == list(range(sum(rows)))
        for t in order:
            start, stop = chunk_ranges(rows[t.rank], count)[t.chunk]
            assert start <= t.offset and t.offset + t.rows <= stop and 0 < t.rows <= tile
            assert t.row == offsets(rows)[t.rank] + t.offset and t.slot == t.rank * count + t.chunk
            assert t.chunk_tiles == sum(o.slot == t.slot for o in order)


def test_a_gather_starts_at_home_and_a_scatter_ends_there() -> None:
    rows = (32, 32, 32)
    gathered = [(t.rank, t.chunk) for t in all_gather_order(rows, 2, 16, 1)]
    assert gathered == [(1, 0), (1, 1), (2, 0), (0, 0), (2, 1), (0, 1)]
    scattered = [(t.rank, t.chunk) for t in reduce_scatter_order(rows, 2, 16, 1)]
    assert scattered == [(2, 0), (0, 0), (2, 1), (0, 1), (1, 0), (1, 1)]


def test_the_table_has_the_fields_in_the_order_that_kernels_read() -> None:
    (row, *_) = as_table(all_gather_order((20, 30), 1, 16, 1))
    assert row == [20, 16, 1, 0, 1, 0, 2, 0] and len(row) == FIELDS


# ---------------------------------------------------------------- sizes


def test_a_configuration_prints_all_that_it_decides() -> None:
    assert str(config()) == (
        "GemmConfig(block_m=128, block_n=256, block_k=64, group_m=2, num_warps=8, num_stages=4, num_programs=132, "
        "num_chunks=1, descriptors=True, precision='ieee', loop='flat')"
    ).replace("group_m=2", f"group_m={config().group_m}").replace("num_chunks=1", f"num_chunks={config().num_chunks}")


@given(
    st.integers(0, 300_000), st.integers(0, 60_000), st.integers(0, 60_000), st.integers(1, 64),
    st.sampled_from(sorted(DTYPES)), st.sampled_from([(89, 142, 99), (90, 132, 227), (100, 148, 227), (120, 170, 99)]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_problem_has_a_configuration_that_fits(
    m: int, n: int, k: int, world_size: int, dtype: str, gpu: tuple[int, int, int], dual: bool, pointers: bool
) -> None:
    capability, num_sms, shared_kib = gpu
    moved = DTYPES[dtype] * k
    found = configure(
        capability=capability, num_sms=num_sms, m=m, n=n, k=k, dtype=dtype, world_size=world_size,
        moved_row_bytes=moved, reserved_sms=8, dual=dual, pointers=pointers,
    )  # fmt: skip
    assert found.num_programs == num_sms - 8
    assert found.tiles.refusal(capability, dtype, dual) is None
    shard = -(-m // world_size)
    assert 1 <= found.num_chunks <= MAX_CHUNKS
    if found.num_chunks > 1:
        assert -(-shard // found.num_chunks) * moved >= MIN_CHUNK_BYTES
    if found.descriptors:
        assert dtype != "float32" and k * DTYPES[dtype] % 16 == 0
    stage = (found.block_m + found.block_n * (2 if dual else 1)) * found.block_k * DTYPES[dtype]
    assert stage * (found.num_stages - (not 90 <= capability < 120)) <= shared_kib * 1024


@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "float32"), (90, "bfloat16"), (90, "float8_e4m3fn"), (120, "float16")]
)
def test_candidates_are_one_step_away_and_fit(capability: int, dtype: str) -> None:
    usual = config(capability=capability, dtype=dtype).tiles
    first, *others = candidates(usual, capability=capability, dtype=dtype)
    assert first == usual and 3 <= len(others) <= 11 and len({first, *others}) == 1 + len(others)
    for tiles in others:
        assert tiles.refusal(capability, dtype) is None
        changed = [
            (old, new) for old, new in zip(asdict(usual).values(), asdict(tiles).values(), strict=True) if old != new
        ]
        ((old, new),) = changed
        assert (old, new) == ("flat", "nested") or new in (old // 2, 2 * old, old - 1, old + 1)
        given = config(capability=capability, dtype=dtype, tiles=tiles)
        assert given.tiles == tiles and 1 <= given.group_m <= 8 and 1 <= given.num_chunks <= MAX_CHUNKS


def test_tiles_that_do_not_fit_are_refused_with_the_numbers() -> None:
    large = Tiles(256, 256, 128, 8, 4)
    with pytest.raises(ValueError, match="590848 bytes of shared memory, sm_90 has 232448"):
        config(tiles=large)
    with pytest.raises(ValueError, match="512 sums in a thread's registers, at most 128"):
        config(tiles=Tiles(256, 256, 16, 4, 2))
    for name, value in (("block_m", 48), ("num_warps", True), ("num_stages", 3.0), ("block_n", "64"), ("block_k", 512)):
        with pytest.raises(ValueError, match=f"{name} \\({value!r}\\) must be one of"):
            replace(large, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("capability", "stages"), [(80, 4), (89, 3), (90, 4), (100, 4), (120, 3)])
def test_there_are_four_stages_or_as_many_as_memory_has_room_for(capability: int, stages: int) -> None:
    found = config(capability=capability).tiles
    assert (found.num_stages, found.loop) == (stages, "flat")
    if stages < 4:
        assert "bytes of shared memory" in str(replace(found, num_stages=stages + 1).refusal(capability, "bfloat16"))


def test_two_weights_take_the_nested_loop_where_the_flat_one_would_wait_for_each_product() -> None:
    assert [config(capability=each, dual=True).loop for each in (80, 90, 100)] == ["flat", "nested", "flat"]


def test_operands_that_are_read_a_number_at_a_time_take_the_nested_loop() -> None:
    flat = replace(config(), descriptors=False)
    x, weight = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(24, 64, dtype=torch.bfloat16)
    assert loop_of(x, weight, flat) == "flat" and loop_of(x, weight, replace(flat, loop="nested")) == "nested"
    odd = torch.zeros(8, 72, dtype=torch.bfloat16)
    for one, other in ((x, torch.zeros(64, 24, dtype=torch.bfloat16).T), (x[:, :41], weight[:, :41]), (odd, weight)):
        assert loop_of(one, other, flat) == "nested"
        assert loop_of(one, other, replace(flat, descriptors=True)) == "flat"


@pytest.mark.parametrize(
    ("out", "fits"),
    [
        (torch.zeros(8, 64, dtype=torch.bfloat16), True),
        (torch.zeros(8, 64), False),
        (torch.zeros(8, 65, dtype=torch.bfloat16), False),
        (torch.zeros(0, 64, dtype=torch.bfloat16), False),
        (torch.zeros(8, 64, dtype=torch.bfloat16)[:, :60], False),
        (torch.zeros(8, 64, dtype=torch.bfloat16)[:, :56], True),
    ],
    ids=["16 bits", "32 bits", "odd rows", "no rows", "ends within 16 bytes", "ends with 16 bytes"],
)
def test_results_have_a_descriptor_where_it_can_be(out: torch.Tensor, fits: bool) -> None:
    assert (result_descriptor(out, config()) is not None) is fits
    assert result_descriptor(out, replace(config(), loop="nested")) is None
    assert result_descriptor(out, replace(config(), descriptors=False)) is None


def test_chunks_feed_whole_waves() -> None:
    """M 4096 over 2 ranks, N 8448 on 132 SMs: a row tile is 33 column tiles, four of them a wave, 16 a shard."""
    found = config(m=4096, n=8448, world_size=2)
    assert (found.block_m, found.block_n, found.num_chunks) == (128, 256, 4)


def test_the_more_peers_there_are_the_fewer_chunks_has_each() -> None:
    """What stays exposed is one chunk of one of them."""
    chunks = {world: config(m=4096 * world, n=8448, world_size=world).num_chunks for world in (2, 3, 5, 8)}
    assert chunks == {2: 8, 3: 4, 5: 2, 8: 1}


def test_few_rows_are_not_cut() -> None:
    assert config(m=64).num_chunks == 1 and config(m=0).num_chunks == 1


def test_options_change_what_they_name() -> None:
    plain = config()
    assert config(reserved_sms=20).num_programs == 112
    assert config(pointers=True).descriptors is False and plain.descriptors is True
    assert config(dtype="float32", allow_tf32=True).precision == "tf32" and config(dtype="float32").precision == "ieee"
    assert config(dual=True).block_n == plain.block_n // 2
    assert config(capability=80, num_sms=108).descriptors is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float64"}, r"dtype \('float64'\) must be one of"),
        ({"dtype": "float8_e4m3fn", "capability": 80}, "float8_e4m3fn needs capability 89 or more, got 80"),
        ({"capability": 75}, "bfloat16 needs capability 80 or more, got 75"),
        ({"m": -1}, r"m, n, k \(-1, 3584, 8192\) must be at least 0"),
        ({"reserved_sms": 132}, r"reserved_sms \(132\) below num_sms \(132\)"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**options)


# ---------------------------------------------------------------- operands

A, B, OUT = torch.zeros(8, 16), torch.zeros(24, 16), torch.zeros(8, 24)
PLAIN = replace(config(dtype="float32"), descriptors=False)


@pytest.mark.parametrize(
    ("operands", "said"),
    [
        ((A, B[:, :8], OUT), r"operands \(8, 16\) and \(24, 8\) must be \[M, K\] and \[N, K\]"),
        ((A, B, OUT.T), r"out \(24, 8\) must be \[M, N\]"),
        ((A, B.double(), OUT), "torch.float64 must both be one of"),
        ((A.T.contiguous().T, B, OUT), "must be contiguous along its last dim"),
    ],
)
def test_operands_that_do_not_fit_are_refused(operands: tuple[torch.Tensor, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_operands(*operands, PLAIN, "none")


def test_operands_that_descriptors_cannot_describe_are_refused() -> None:
    odd = torch.zeros(8, 17, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"descriptors need K contiguous.*pointers=True"):
        check_operands(odd, odd, None, config(), "none")


@pytest.mark.parametrize(
    ("dtype", "fits"), [(torch.bfloat16, True), (torch.float16, True), (torch.float8_e4m3fn, False)]
)
def test_a_weight_that_is_contiguous_along_n_has_a_descriptor_if_it_has_16_bits(dtype: torch.dtype, fits: bool) -> None:
    x, weight = torch.zeros(8, 32).to(dtype), torch.zeros(32, 48).to(dtype).T
    assert weight_descriptor_fits(weight) is fits
    if fits:
        assert check_operands(x, weight, None, config(), "none") == (8, 32)
        assert is_transposed(weight, config()) and not is_transposed(weight.contiguous(), config())
    else:
        with pytest.raises(ValueError, match="descriptors need K contiguous"):
            check_operands(x, weight, None, config(), "none")


def test_scales_come_in_pairs_of_one_kind() -> None:
    one, rows, columns = torch.ones(1), torch.ones(8), torch.ones(24)
    assert scale_kind(None, None, 8, 24) == "none"
    assert scale_kind(one, one, 8, 24) == "tensor"
    assert scale_kind(rows, columns, 8, 24) == "row"
    # The only row and column: as of a matrix of which they are a part.
    assert scale_kind(rows[:1].view(1, 1), columns[:1].view(1, 1), 1, 1) == "row"
    for pair in ((one, columns), (rows, None), (columns, rows)):
        with pytest.raises(ValueError, match="must both have one element, or 8 and 24"):
            scale_kind(*pair, 8, 24)
