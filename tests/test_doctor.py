"""What `tpkernels doctor` says about the compiled core and the services that shared memory stands on."""

from __future__ import annotations

import fcntl
import os
import types

import pytest

from tpkernels import doctor
from tpkernels.gemm import native

pytestmark = pytest.mark.cpu


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
