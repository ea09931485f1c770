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
