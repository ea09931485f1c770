"""What the process environment may say, and how a wrong value is refused."""

from __future__ import annotations

import pytest

from tpkernels import config

pytestmark = pytest.mark.cpu


def test_an_empty_environment_gives_the_defaults() -> None:
    assert config.load({}) == config.Config(calibrate=True, num_chunks=None, nccl_max_ctas=None)
    assert config.load({"TPKERNELS_CALIBRATE": "", "TPKERNELS_NUM_CHUNKS": ""}) == config.load({})


def test_every_variable_is_read() -> None:
    environ = {"TPKERNELS_CALIBRATE": "0", "TPKERNELS_NUM_CHUNKS": "5", "TPKERNELS_NCCL_MAX_CTAS": "4"}
    assert config.load(environ) == config.Config(calibrate=False, num_chunks=5, nccl_max_ctas=4)
    assert config.load({"TPKERNELS_CALIBRATE": "1"}).calibrate
    assert config.load({"TPKERNELS_NCCL_ZERO_CTA": "1"}).nccl_zero_cta and not config.load({}).nccl_zero_cta
    assert config.load({}).same_bits is None and config.load({"TPKERNELS_SAME_BITS": "8"}).same_bits == 8
    assert config.load({}).stream_writes and not config.load({"TPKERNELS_STREAM_WRITES": "0"}).stream_writes


def test_the_live_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPKERNELS_NUM_CHUNKS", "3")
    assert config.load().num_chunks == 3
    monkeypatch.setenv("TPKERNELS_NUM_CHUNKS", "4")
    assert config.load().num_chunks == 4


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TPKERNELS_CALIBRATE", "yes", "must be 0 or 1"),
        ("TPKERNELS_NUM_CHUNKS", "0", "must be a positive integer"),
        ("TPKERNELS_NUM_CHUNKS", "-2", "must be a positive integer"),
        ("TPKERNELS_NUM_CHUNKS", "two", "must be a positive integer"),
        ("TPKERNELS_NCCL_MAX_CTAS", "1.5", "must be a positive integer"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} {expected}, got '{value}'"):
        config.load({name: value})


OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


@pytest.mark.parametrize(
    ("environ", "inside"),
    [
        ({}, OURS),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, OURS | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, OURS | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, OURS | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        # torchrun says 1 for users who have said nothing
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "7"}, OURS | {"TORCHELASTIC_RUN_ID": "7"}),
        (
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCHELASTIC_RUN_ID": "7"},
            OURS | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCHELASTIC_RUN_ID": "7"},
        ),
    ],
)
def test_nccl_groups_are_made_with_what_lets_failures_raise_unless_the_user_says_otherwise(
    environ: dict[str, str], inside: dict[str, str]
) -> None:
    found = dict(environ)
    with config.nccl_failures_raise(found):
        assert found == inside
    assert found == environ, "groups that the user makes are not ours to decide about"
    with pytest.raises(KeyError), config.nccl_failures_raise(found):
        raise KeyError
    assert found == environ


def test_the_old_name_of_a_variable_of_torch_counts_as_set() -> None:
    found = {"NCCL_ASYNC_ERROR_HANDLING": "3"}
    with config.nccl_failures_raise(found):
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in found


@pytest.mark.parametrize(("value", "blocks"), [(None, False), ("0", False), ("1", True), ("True", True), ("n", False)])
def test_blocking_waits_are_read_as_torch_reads_them(value: str | None, blocks: bool) -> None:
    environ = {} if value is None else {"TORCH_NCCL_BLOCKING_WAIT": value}
    assert config.nccl_waits_block(environ) == blocks


def test_a_local_rank_is_a_number_or_nothing() -> None:
    assert config.local_rank({}) is None and config.local_rank({"LOCAL_RANK": "3"}) == 3
    with pytest.raises(ValueError, match="LOCAL_RANK must be a number of at least 0, got '-1'"):
        config.local_rank({"LOCAL_RANK": "-1"})
