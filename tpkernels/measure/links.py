"""Rate-limited links between anonymous network namespaces: the plumbing under the network lab.

Owns: entering a namespace, the bridge, veth pairs, token-bucket shaping, byte counters.
Assumes: Linux, CAP_SYS_ADMIN and CAP_NET_ADMIN, `pyroute2`. Imports neither torch nor the rest of tpkernels, so that
the probe (`python links.py`) starts in a fraction of a second.
Refuses: named namespaces. Every namespace here is held by a process only; when that process dies, however it dies,
the kernel destroys the namespace, the veth inside it, and with the veth its other end. Nothing is ever created in the
caller's own namespace, so there is no name to collide with and nothing to clean up there.

Topology: one switch namespace with a bridge; each host has `eth0`, whose other end is a port of the bridge.

    host 0: eth0 10.77.0.1 --tbf-->  port0 |
    host 1: eth0 10.77.0.2 --tbf-->  port1 | bridge 10.77.0.254 (rendezvous store)
    host 2: eth0 10.77.0.3 --tbf-->  port2 |
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

CLONE_NEWNET = 0x40000000
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21

SWITCH_ADDRESS = "10.77.0.254"
HOST_INTERFACE = "eth0"
MIN_HOSTS, MAX_HOSTS = 2, 8

_UNITS_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_UNITS_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class LinkSpec:
    """What every host's link does. `rate_bits` bounds each direction; `delay_s` is added once per one-way trip."""

    rate_bits: int
    delay_s: float = 0.0

    @classmethod
    def parse(cls, rate: str, delay: str | None = None) -> LinkSpec:
        return cls(parse_rate(rate), parse_delay(delay) if delay is not None else 0.0)

    @property
    def burst_bytes(self) -> int:
        # 2 ms worth keeps the shaper from idling between timer ticks; below 128 KiB one 64 KiB GSO packet and the
        # next cannot both be in the bucket and throughput drops under the named rate.
        return max(128 * 1024, self.rate_bits // 8 // 500)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--netlab RATE`` and ``--delay TIME``, which a command passes to the network lab as they were written."""
    parser.add_argument(
        "--netlab", type=partial(_written, parse_rate), metavar="RATE",
        help="ranks on hosts of their own, joined at RATE, e.g. 1gbit; root",
    )  # fmt: skip
    parser.add_argument(
        "--delay", type=partial(_written, parse_delay), metavar="TIME",
        help="with --netlab: one-way delay of a link, e.g. 0.1ms",
    )  # fmt: skip


def _written(parse: Callable[[str], float], text: str) -> str:
    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_rate(rate: str) -> int:
    """`"1gbit"`, `"2.5gbit"`, `"500mbit"` -> bits per second."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?bit)\s*", rate.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"rate must look like '1gbit' or '500mbit' and be positive, got {rate!r}")
    return int(float(match[1]) * _UNITS_BITS[match[2]])


def parse_delay(delay: str) -> float:
    """`"0.1ms"`, `"50us"` -> seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", delay.lower())
    if match is None:
        raise ValueError(f"delay must look like '0.1ms' or '50us', got {delay!r}")
    return float(match[1]) * _UNITS_SECONDS[match[2]]


def host_address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _libc_call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{name}{args}: {os.strerror(errno)}")


def enter_new_namespace() -> None:
    """Move the calling thread (and the threads it starts later) into a fresh network namespace with `lo` up."""
    _libc_call("unshare", CLONE_NEWNET)
    with _route() as route:
        route.link("set", index=_index(route, "lo"), state="up")


def make_switch() -> None:
    """In the calling thread's namespace: one bridge with the switch's address."""
    with _route() as route:
        route.link("add", ifname="switch", kind="bridge")
        index = _index(route, "switch")
        route.addr("add", index=index, address=SWITCH_ADDRESS, prefixlen=24)
        route.link("set", index=index, state="up")


def plug_host(rank: int, pid: int, spec: LinkSpec, *, shape_downlink: bool) -> None:
    """From the switch: give the namespace of process `pid` an `eth0` whose other end is port `rank` of the bridge.

    With more than two hosts several senders may converge on one; a real switch port then limits them to its rate, so
    the port towards the host is shaped as well (`shape_downlink`). With two hosts that would only add a second queue.
    """
    port = f"port{rank}"
    with _route() as route:
        route.link("add", ifname=port, kind="veth", peer={"ifname": HOST_INTERFACE, "net_ns_pid": pid})
        index = _index(route, port)
        route.link("set", index=index, master=_index(route, "switch"), state="up")
        if shape_downlink:
            _shape(route, index, spec)


def configure_host(rank: int, spec: LinkSpec) -> None:
    """In the host's namespace, once plugged: address, shaping on egress, link up."""
    with _route() as route:
        index = _index(route, HOST_INTERFACE)
        route.addr("add", index=index, address=host_address(rank), prefixlen=24)
        _shape(route, index, spec)
        route.link("set", index=index, state="up")
    if spec.delay_s > 0:
        _add_delay(spec)


def _shape(route: Any, index: int, spec: LinkSpec) -> None:
    rate_bytes = spec.rate_bits // 8
    route.tc("add", "tbf", index=index, handle=0x10000, rate=rate_bytes, burst=spec.burst_bytes, latency="50ms")


def _add_delay(spec: LinkSpec) -> None:
    """Below the token bucket of this namespace's `eth0`: hold every packet for `delay_s`."""
    packets = max(1000, int(spec.rate_bits / 8 / 1500 * spec.delay_s * 4))  # what is in flight, four times over
    delay_us = round(spec.delay_s * 1e6)
    try:
        with _route() as route:
            index = _index(route, HOST_INTERFACE)
            route.tc("add", "netem", index=index, parent=0x10001, handle=0x100000, delay=delay_us, limit=packets)
    except FileNotFoundError as error:
        raise OSError(f"a link delay needs the kernel module sch_netem, which this kernel lacks ({error})") from error


@contextmanager
def _route() -> Iterator[Any]:
    """A netlink socket to the calling thread's namespace. The kernel's refusals come out as OSError."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            yield route
    except NetlinkError as error:
        raise OSError(error.code, f"netlink: {error.args[-1]}") from error


def _index(route: Any, name: str) -> int:
    found = route.link_lookup(ifname=name)
    if not found:
        raise OSError(f"no interface named {name!r} in this network namespace")
    return int(found[0])


def read_counters() -> dict[str, tuple[int, int]]:
    """`{interface: (rx_bytes, tx_bytes)}` of this process's namespace.

    Read from /proc/self/net, which follows the process; /sys/class/net keeps showing the namespace it was mounted in.
    """
    counters = {}
    with open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file.readlines()[2:]:
            name, _, fields = line.partition(":")
            values = fields.split()
            counters[name.strip()] = (int(values[0]), int(values[8]))
    return counters


def missing_capability() -> str | None:
    """Why this process cannot make network namespaces, by what it can read about itself; None if nothing is missing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    missing = [
        name
        for name, bit in (("CAP_SYS_ADMIN", CAP_SYS_ADMIN), ("CAP_NET_ADMIN", CAP_NET_ADMIN))
        if not effective >> bit & 1
    ]
    return f"needs root ({' and '.join(missing)} missing)" if missing else None


def probe() -> None:
    """Build the smallest lab (one namespace, one shaped veth) in this process; raise what fails."""
    enter_new_namespace()
    make_switch()
    spec = LinkSpec.parse("1gbit")
    with _route() as route:
        route.link("add", ifname="port0", kind="veth", peer={"ifname": HOST_INTERFACE})
    configure_host(0, spec)


if __name__ == "__main__":
    try:
        probe()
    except (OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)
