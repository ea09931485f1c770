"""Plans, manifests, indices, headers and messages in which anything stands are a ValueError, or are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("safetensors", reason="the package safetensors is missing")

from tests.fuzzing.parsers import ODD_TEXTS, PARSERS, _base, changed, check, fuzz
from tpkernels.comm import heartbeats

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_right_is_read_and_rubbish_is_a_value_error(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    parser.read(parser.write(_base(name)), tmp_path)
    for text in ODD_TEXTS if name != "message" else [text for text in ODD_TEXTS if text[:1] != b"{"]:  # any object
        with pytest.raises(ValueError):
            parser.read(text, tmp_path)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.slow("4 s")
def test_a_change_of_any_part_is_a_value_error_or_is_read(name: str, full: bool) -> None:
    if full:
        assert fuzz(name, 20.0) > 0
        return

    @settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(changed(name))
    def run(content: bytes) -> None:
        check(name, content)

    run()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("order of calls", b'{"place": Infinity, "call": 7, "digest": 5, "steps": [], "words": []}'),
        ("order of calls", b'{"place": 3, "call": 1e999, "digest": 5, "steps": [], "words": []}'),
    ],
)
def test_what_fuzzing_has_found(name: str, content: bytes) -> None:
    """Each raised something else: an OverflowError took the place of the error that a call was about to raise."""
    check(name, content)


def test_a_heartbeat_may_be_any_text() -> None:
    assert heartbeats.calls({0: "1 " + "9" * 5000, 1: "1 7", 2: "x", 3: "1 -1"})[1] == 7
