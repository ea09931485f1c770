"""Hosts that are network namespaces, and a switch in this process through which every frame between them goes.

Owns: one `Network` per trial, with a thread that forwards frames, and what each direction of each pair of hosts suffers
(`Weather`): loss, delay, frames that overtake each other, duplicates. Here and not in the kernel, because few kernels
have netem, and because one way of one link must be cut alone.

A host is a process that has called `join`: it makes a TAP device in a namespace of its own and hands its descriptor to
the switch, through a Unix socket that has a path (abstract names belong to a namespace). Nothing else is made, so
nothing is left: the kernel takes namespace and device away with the last process that has them open.

Assumes: root on Linux, /dev/net/tun. `unavailable` says what is missing.
"""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpkernels.measure import links

__all__ = ["INTERFACE", "Network", "Weather", "address", "join", "unavailable"]

INTERFACE = "eth0"
MTU = 9000  # few frames: the switch is a loop in Python
_TUN = "/dev/net/tun"
# linux/if_tun.h, linux/sockios.h, linux/if.h
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFMTU = 0x8916, 0x891C, 0x8913, 0x8914, 0x8922
_IFF_UP = 0x1
_BROADCAST = 0x01  # of the first byte of a destination: to several hosts


def unavailable() -> str | None:
    """Why there can be no such network here, or None."""
    missing = links.missing_capability()
    if missing is not None:
        return missing
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"needs {_TUN}"
    return None


def address(host: int) -> str:
    return f"10.78.0.{host + 1}"


# ---------------------------------------------------------------- in the host


def join(host: int, switch: str) -> None:
    """Move the calling thread, and those that it starts, to a host of its own, plugged into the switch at this path."""
    links.enter_new_namespace()
    tap = os.open(_TUN, os.O_RDWR)
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _set(control, _SIOCSIFADDR, _ipv4(address(host)))
            _set(control, _SIOCSIFNETMASK, _ipv4("255.255.255.0"))
            _set(control, _SIOCSIFMTU, struct.pack("i", MTU))
            request = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16s24x", INTERFACE.encode()))
            (flags,) = struct.unpack_from("H", request, 16)
            _set(control, _SIOCSIFFLAGS, struct.pack("H", flags | _IFF_UP))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as plug:
            plug.settimeout(10.0)
            plug.connect(switch)
            socket.send_fds(plug, [bytes([host])], [tap])
            plug.recv(1)  # it has it
    finally:
        os.close(tap)


def _ipv4(dotted: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(dotted))


def _set(control: socket.socket, what: int, value: bytes) -> None:
    fcntl.ioctl(control, what, struct.pack("16s24s", INTERFACE.encode(), value))


# ---------------------------------------------------------------- the switch


@dataclass(frozen=True)
class Weather:
    """What frames of one direction between two hosts suffer; loss and duplicate are probabilities."""

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    duplicate: float = 0.0


FINE, CUT = Weather(), Weather(loss=1.0)


def _together(weathers: Sequence[Weather]) -> Weather:
    """What a frame suffers that goes through one after the other."""
    if not weathers:
        return FINE
    return Weather(
        loss=1.0 - math.prod(1.0 - one.loss for one in weathers),
        delay_s=sum(one.delay_s for one in weathers),
        jitter_s=sum(one.jitter_s for one in weathers),
        duplicate=max(one.duplicate for one in weathers),
    )


class Network:
    """The switch, at a Unix socket in `folder`. A context manager; leaving it unplugs everybody."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = str(folder / "switch")
        self.forwarded = 0
        self._dice = random.Random(seed)
        self._faults: dict[tuple[int, int], list[Weather]] = {}
        self._weather: dict[tuple[int, int], Weather] = {}
        self._taps: dict[int, int] = {}
        self._host_of: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="nemesis-switch", daemon=True)

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._woken)  # which the thread sees as the end
        self._thread.join(10.0)
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        for tap in self._taps.values():
            os.close(tap)

    def begin(self, sender: int, receiver: int, weather: Weather) -> None:
        """From now on, on top of what this direction suffers already; frames under way keep their fate."""
        self._faults.setdefault((sender, receiver), []).append(weather)
        self._weather[sender, receiver] = _together(self._faults[sender, receiver])

    def end(self, sender: int, receiver: int, weather: Weather) -> None:
        """What else has begun goes on."""
        self._faults[sender, receiver].remove(weather)
        self._weather[sender, receiver] = _together(self._faults[sender, receiver])

    def weather(self, sender: int, receiver: int) -> Weather:
        return self._weather.get((sender, receiver), FINE)

    def _run(self) -> None:
        with suppress(PermissionError):  # of this thread alone: a busy machine makes no network slow
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listener:
                    self._plug()
                elif key.fd == self._wake:
                    return
                else:
                    self._forward(key.data)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(self._late)
                self._deliver(host, frame)

    def _plug(self) -> None:
        plug, _ = self._listener.accept()
        with plug:
            word, descriptors, _, _ = socket.recv_fds(plug, 1, 1)
            host, tap = word[0], descriptors[0]
            os.set_blocking(tap, False)
            self._taps[host] = tap
            self._selector.register(tap, selectors.EVENT_READ, host)
            with suppress(OSError):
                plug.send(b"1")

    def _forward(self, sender: int) -> None:
        """The frames of a host that are there now."""
        for _ in range(64):
            try:
                frame = os.read(self._taps[sender], 65536)
            except BlockingIOError:
                return
            except OSError:  # the host is gone, and its device with it
                self._selector.unregister(self._taps[sender])
                return
            self._host_of[frame[6:12]] = sender
            known = None if frame[0] & _BROADCAST else self._host_of.get(frame[:6])
            for receiver in [known] if known is not None else [one for one in self._taps if one != sender]:
                self._send(sender, receiver, frame)

    def _send(self, sender: int, receiver: int, frame: bytes) -> None:
        weather = self.weather(sender, receiver)
        if weather is FINE:
            self._deliver(receiver, frame)
            return
        for _ in range(2 if self._dice.random() < weather.duplicate else 1):
            if self._dice.random() >= weather.loss:
                due = time.monotonic() + weather.delay_s + self._dice.random() * weather.jitter_s
                heapq.heappush(self._late, (due, self._dice.getrandbits(30), receiver, frame))

    def _deliver(self, host: int, frame: bytes) -> None:
        self.forwarded += 1
        with suppress(OSError):  # its queue is full, as a switch's may be, or it is gone
            os.write(self._taps[host], frame)
