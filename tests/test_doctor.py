"""What `tpkernels doctor` says about the compiled core and the services that shared memory stands on."""

from __future__ import annotations

import fcntl
import os
import re
import types
from pathlib import Path

import pytest

from tpkernels import doctor, packages
from tpkernels.gemm import native

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]


def core_finding() -> doctor.Finding:
    (finding,) = (finding for finding in doctor._core() if finding.name == "compiled core")
    return finding


def test_a_core_that_works_is_shown_with_compiler_and_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(ABI=1, active_isa=lambda: "avx2")
    monkeypatch.setattr(native, "native", lambda: module)
    monkeypatch.setattr(native, "outdated", lambda module: False)
    monkeypatch.setattr(native, "build_record", lambda: native.BuildRecord(built=True, compiler="g++ 12.2.0"))
    assert core_finding().value == "works, running avx2 code, revision 1, built by g++ 12.2.0"
    assert core_finding().status == "ok"
    monkeypatch.setattr(native, "outdated", lambda module: True)
    assert core_finding().status == "optional" and "csrc/ has changed since: " in core_finding().advice


def test_a_core_that_was_not_built_is_shown_with_reason_remedy_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    record = native.BuildRecord(
        built=False, reason="g++ 4.8 failed", advice="a newer compiler may do", errors=("a.cpp: error",)
    )
    monkeypatch.setattr(native, "native", lambda: None)
    monkeypatch.setattr(native, "why_not", lambda: "the compiled core was not built: g++ 4.8 failed")
    monkeypatch.setattr(native, "build_record", lambda: record)
    finding = core_finding()
    assert finding.status == "optional", "everything else works without it"
    assert "g++ 4.8 failed" in finding.value
    assert finding.advice.splitlines() == [
        "a.cpp: error", "a newer compiler may do", f"then build it: {native.how_to_rebuild()}"
    ]  # fmt: skip
    monkeypatch.setattr(native, "build_record", lambda: None)
    assert core_finding().advice == f"build it: {native.how_to_rebuild()}"


def test_every_service_is_tried_here_and_leaves_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name, attempt in doctor.SERVICES.items():
        attempt()
        assert len(os.listdir("/proc/self/fd")) == before, name


def refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("service", "module", "function"),
    [
        ("memfd_create", os, "memfd_create"),
        ("memfd_create", os, "posix_fallocate"),
        ("F_OFD_SETLK", fcntl, "fcntl"),
        ("descriptors over Unix sockets", doctor.socket, "recv_fds"),
        ("/proc", os, "stat"),
    ],
)
def test_a_service_that_the_kernel_refuses_is_a_finding_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, service: str, module: types.ModuleType, function: str
) -> None:
    monkeypatch.setattr(module, function, refuse)
    finding = doctor._service(service, doctor.SERVICES[service])
    assert finding is not None and finding.status == "optional" and finding.name == service
    assert finding.value == "fails: [Errno 1] Operation not permitted"


def test_a_lock_that_excludes_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "fcntl", lambda *args: b"")
    finding = doctor._service("F_OFD_SETLK", doctor.SERVICES["F_OFD_SETLK"])
    assert finding is not None and "two holders got the same lock" in finding.value


def test_a_trainer_outside_of_its_tested_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    newest, oldest = packages.TESTED["megatron"][0], packages.TESTED["megatron"][-1]
    for version, known in ((f"{newest}.9", True), (f"{oldest}.0", True), ("0.9.4", False), ("1.0", False)):
        monkeypatch.setattr(doctor, "_version", lambda package, version=version: version)
        (found,) = (finding for finding in doctor._extras() if finding.name.startswith("megatron "))
        assert found.value == version and found.status == ("ok" if known else "optional")
        assert known or f"tested with megatron {oldest} to {newest}" in found.advice


def test_the_page_about_trainers_has_the_tested_versions() -> None:
    page = ROOT.joinpath("docs", "trainers.md").read_text(encoding="utf-8")
    readme = ROOT.joinpath("README.md").read_text(encoding="utf-8")
    for module, versions in packages.TESTED.items():
        name = {"ray": "Ray Train", "torch": "torch's `parallelize_module`"}.get(module, rf"{module}\S*")
        in_words = " and ".join([", ".join(versions[:-1]), versions[-1]])
        assert re.search(rf"{name} {in_words}\b", readme, re.I), f"README: {module} {versions}"
        pattern = rf"^\| (?:the )?{name} \| {re.escape(', '.join(versions))} \|"
        assert re.search(pattern, page, re.M | re.I), f"{module} {versions}"


def test_findings_fit_into_the_terminal_and_commands_stay_whole() -> None:
    command = "/a/folder/bin/python -m pip install --no-deps -e /another/folder/with/a/long/name/in/it/tpkernels"
    advice = f"what has changed is of no use before the core is built anew, which takes a minute:\n{command}"
    finding = doctor.Finding("area", "compiled core", "works, but is older than its sources, " * 4, "optional", advice)
    lines = doctor._lines(finding, 80)
    assert lines[0].startswith("  --  compiled core") and command in lines[-1]
    assert max(len(line) for line in lines[:-1]) <= 80 < len(lines[-1])
    assert " ".join(" ".join(lines).split()) == " ".join(f"-- compiled core {finding.value} {advice}".split())
