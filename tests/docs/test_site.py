"""The site builds without a warning, and its tables of settings, errors and functions are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tpkernels as tpk

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


def page(name: str) -> str:
    return ROOT.joinpath("docs", name).read_text(encoding="utf-8")


def first_columns(text: str) -> list[str]:
    """What stands in backticks in the first column of the tables."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.M)


@pytest.mark.full("12 s of a core, a step of its own in .ci/run")
@pytest.mark.cpu
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='the site needs pip install ".[docs]"')
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    api = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("api/*/index.html"))
    assert 'id="tpkernels.parallelize"' in api
    assert "doc-module" not in api, "a module stands where a function is meant"
    for text in re.findall(r"<p>(.*?)</p>", re.sub(r"<code>[^<]*</code>", "", api), re.S):
        assert "::" not in text and ":func:" not in text and "====" not in text, text


@pytest.mark.cpu
def test_every_setting_of_config_is_on_the_page_of_settings() -> None:
    read = set(re.findall(r"TPKERNELS_[A-Z_]*[A-Z]", ROOT.joinpath("tpkernels/config.py").read_text(encoding="utf-8")))
    listed = {name for name in first_columns(page("tuning.md")) if name.startswith("TPKERNELS_")}
    assert listed == read


@pytest.mark.cpu
def test_every_error_is_on_the_page_of_troubles() -> None:
    listed = first_columns(page("troubleshooting.md"))
    assert set(tpk.errors.__all__) - {"TpKernelsError"} <= set(listed)


@pytest.mark.cpu
def test_every_public_name_is_in_the_api_pages() -> None:
    listed = set()
    for path in ROOT.joinpath("docs/api").glob("*.md"):
        # A function whose module has its name is listed as `ops.name.name`: the site would show the module.
        listed |= set(re.findall(r"^::: tpkernels\.(?:ops\.\w+\.)?(\S+)", path.read_text(encoding="utf-8"), re.M))
    public = set(tpk.__all__) - {"nn", "optim", "sharding", "errors", "VerificationError", "keras"}
    public |= {f"integrations.keras.{name}" for name in tpk.keras.__all__} - {"integrations.keras.TensorParallelKeras"}
    public |= {f"nn.{name}" for name in tpk.nn.__all__} | {f"optim.{name}" for name in tpk.optim.__all__}
    public |= {f"errors.{name}" for name in tpk.errors.__all__}
    sharding = tpk.__getattr__("sharding")  # as the first time that it is asked for
    public |= {f"sharding.{name}" for name in set(sharding.__all__) - set(tpk.__all__)}
    assert public - listed == set()
