"""The bill of materials of an environment, and the advisories that are known of what is in it.

    python .ci/audit.py TOOLS [--require]      TOOLS: a folder with cyclonedx-bom and pip-audit, see .ci/run

Writes build/sbom.json (CycloneDX) and build/audit.json. Exit code 1: the bill leaves out a package, or there is an
advisory of a package that `pip install tpkernels` brings, which ADVISORIES below does not accept. Advisories of
other packages, which only tests and documents use, are printed: they reach no user, and whoever changes something else
need not wait for them.

pip-audit says "No known vulnerabilities found", and ends with 0, also where the service knew none of the packages, as
behind a mirror that serves files alone. So it is counted how many of them it was asked about in vain. Where that is
every one, or where nobody answered, nothing was audited: that is said, and is a failure with --require, as before a
release.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ADVISORIES: dict[str, str] = {}
"""Advisories that are accepted, by their names, with the reason."""
LIMIT_S = 240


class Verdict(NamedTuple):
    failures: list[str]
    warnings: list[str]
    audited: int
    """Packages that the service knew."""


def brought_by(name: str) -> set[str]:
    """The packages that installing this one brings, itself included, of those that are installed here."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = canonicalize_name(waiting.pop())
        if one in found:
            continue
        try:
            needs = metadata.requires(one) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(one)
        parsed = [Requirement(text) for text in needs]
        waiting += [need.name for need in parsed if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def missing_of(bill: Mapping[str, Any], installed: Mapping[str, str]) -> list[str]:
    """What is installed and not in the bill under its version."""
    components = [bill["metadata"]["component"], *bill.get("components", ())]
    listed = {canonicalize_name(one["name"]): one.get("version") for one in components}
    return sorted(f"{name} {version}" for name, version in installed.items() if listed.get(name) != version)


def judge(report: Mapping[str, Any], brought: Iterable[str], accepted: Iterable[str] = ADVISORIES) -> Verdict:
    """What pip-audit's report amounts to."""
    brought, accepted = set(brought), set(accepted)
    verdict = Verdict([], [], sum("skip_reason" not in one for one in report["dependencies"]))
    for one in report["dependencies"]:
        for advisory in one.get("vulns", ()):
            if accepted.isdisjoint({advisory["id"], *advisory.get("aliases", ())}):
                mended = ", ".join(advisory.get("fix_versions", ())) or "no version yet"
                where = verdict.failures if canonicalize_name(one["name"]) in brought else verdict.warnings
                where.append(f"{one['name']} {one['version']}: {advisory['id']}, mended in {mended}")
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog=".ci/audit.py")
    parser.add_argument("tools", type=Path)
    parser.add_argument("--require", action="store_true", help="fail where the advisory service is not reached")
    given = parser.parse_args()
    build = Path("build")
    build.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(given.tools.resolve())}

    def tool(*command: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", *command]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    # Of this interpreter's packages, without the tools.
    installed = {canonicalize_name(one.name): one.version for one in metadata.distributions()}
    bill = build / "sbom.json"
    made = tool(
        "cyclonedx_py", "environment", sys.executable, "--pyproject", "pyproject.toml", "--output-reproducible",
        "--no-validate", "--output-file", str(bill),
    )  # fmt: skip
    if made.returncode != 0:
        print(f"no bill of materials: {made.stderr[-2000:]}")
        return 1
    missing = missing_of(json.loads(bill.read_text()), installed)
    print(f"bill of materials: {bill}, {len(installed)} packages")
    for one in missing:
        print(f"FAILED: the bill leaves out {one}")

    found = build / "audit.json"
    found.unlink(missing_ok=True)
    folder = str(Path(metadata.distribution("packaging").locate_file("")).resolve())
    try:
        audit = tool("pip_audit", "--path", folder, "-f", "json", "--progress-spinner", "off", "-o", str(found))
        silence = audit.stderr[-500:]
    except subprocess.TimeoutExpired:
        silence = f"no answer within {LIMIT_S} s"
    verdict = judge(json.loads(found.read_text()), brought_by("tpkernels")) if found.exists() else Verdict([], [], 0)
    for one in verdict.warnings:
        print(f"advisory of a package that only tests and documents use: {one}")
    for one in verdict.failures:
        print(f"FAILED: advisory: {one}")
    if verdict.audited == 0:
        why = "the service knew none of the packages" if found.exists() else silence
        print(f"NOT AUDITED: {why}. Whether there are advisories is not known.")
    else:
        print(f"audited: {verdict.audited} of {len(installed)} packages")
    return int(bool(missing or verdict.failures or (given.require and verdict.audited == 0)))


if __name__ == "__main__":
    sys.exit(main())
