"""What .ci/audit.py makes of a bill of materials and of pip-audit's report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", Path(__file__).parents[1] / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module  # where its NamedTuple looks for its annotations
    spec.loader.exec_module(module)
    return module


def _found(name: str, *advisories: str) -> dict[str, Any]:
    vulns = [{"id": one, "aliases": [f"CVE of {one}"], "fix_versions": ["9.9"]} for one in advisories]
    return {"name": name, "version": "1.0", "vulns": vulns}


def test_an_advisory_of_what_users_install_is_a_failure_and_one_of_a_test_tool_is_said(audit: ModuleType) -> None:
    report = {"dependencies": [_found("Torch", "PYSEC-1"), _found("pytest", "PYSEC-2"), _found("numpy")]}
    verdict = audit.judge(report, {"torch", "numpy"})
    assert verdict.failures == ["Torch 1.0: PYSEC-1, mended in 9.9"]
    assert verdict.warnings == ["pytest 1.0: PYSEC-2, mended in 9.9"]
    assert verdict.audited == 3
    assert audit.judge(report, {"torch"}, accepted={"CVE of PYSEC-1": "why"}).failures == []


def test_packages_that_the_service_does_not_know_are_not_audited(audit: ModuleType) -> None:
    """pip-audit ends well, and says that there are no known vulnerabilities."""
    report = {"dependencies": [{"name": "torch", "skip_reason": "not found"}]}
    assert audit.judge(report, {"torch"}) == audit.Verdict([], [], 0)


def test_a_bill_that_leaves_a_package_out_or_has_another_version_is_noticed(audit: ModuleType) -> None:
    bill = {
        "metadata": {"component": {"name": "tpkernels", "version": "0.1.0"}},
        "components": [{"name": "PyYAML", "version": "6.0"}, {"name": "numpy", "version": "1.0"}],
    }
    installed = {"tpkernels": "0.1.0", "pyyaml": "6.0", "numpy": "2.0", "rich": "1"}
    assert audit.missing_of(bill, installed) == ["numpy 2.0", "rich 1"]


def test_what_installing_tpkernels_brings_has_its_dependencies_and_no_test_tool(audit: ModuleType) -> None:
    brought = audit.brought_by("torch")
    assert {"torch", "sympy", "jinja2", "markupsafe"} <= brought and "pytest" not in brought
