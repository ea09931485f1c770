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


def test_a_process_that_no_launcher_started_has_no_place_in_a_job() -> None:
    assert config.torchrun_environment({}) is None
    assert config.torchrun_environment({"RANK": "0"}) is None


def test_torchruns_variables_say_where_a_rank_stands() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert config.torchrun_environment(environ) == config.TorchrunEnvironment(5, 1, 8, 4)
    only_rank = {"RANK": "1", "WORLD_SIZE": "2"}
    assert config.torchrun_environment(only_rank) == config.TorchrunEnvironment(1, 1, 2, 2)
