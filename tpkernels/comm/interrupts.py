"""Ctrl-C ends a call that waits in compiled code, at once.

Python runs a signal's handler in the main thread, between two steps of the interpreter.  A main thread that waits for a
peer inside of gloo takes none until the peer comes.  So the interpreter's wake-up descriptor leads to a thread of this
module: on SIGINT it ends the wait of a call that the main thread is in, and the handler raises ``KeyboardInterrupt``
there.  :func:`ending` does the same for waits outside of calls.  The monitor has other things to do: while it asked the
store of a busy job, Ctrl-C took up to half a second.

A wait in our own compiled core takes Python's lock only when a signal has come; this module tells it.

Owns: that thread, and the wake-up descriptor, where nobody else has it (asyncio's event loops do, while they run), and
only while SIGINT has Python's own handler: another one may let the call go on.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tpkernels.comm import resources, transport
from tpkernels.comm.groups import Group
from tpkernels.gemm.native import native

__all__ = ["end_call_of_main_thread", "ending", "listen"]

# The main thread has so long to take the signal by itself.
_MOMENT = 0.01
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_pair: tuple[socket.socket, socket.socket] | None = None
"""The end that this process reads, and the one that signals write to."""
_thread: threading.Thread | None = None
_enders: list[Callable[[], None]] = []
"""What ends the wait that the main thread is in, outside of a call."""


def _ends() -> tuple[socket.socket, socket.socket]:
    global _pair
    with _lock:
        if _pair is None:
            _pair = socket.socketpair()
            _pair[1].setblocking(False)  # as Python demands of it
        return _pair


def listen() -> None:
    """Have SIGINT end the waits of the main thread; does nothing in other threads than that one."""
    global _thread
    if threading.current_thread() is not threading.main_thread():
        return
    if _thread is None:
        _thread = threading.Thread(target=_attend, name="tpkernels-interrupts", daemon=True)
        _thread.start()
    mine = _ends()[1].fileno()
    before = signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
    is_ours = before in (-1, mine)
    if not is_ours:
        signal.set_wakeup_fd(before)
    _tell_core(is_ours)


def _tell_core(whether: bool) -> None:
    core: Any = native()
    if core is not None:
        core.tell_signals(whether)


def _leave_to_the_parent() -> None:
    """A forked child's signals are not its parent's, and it has ends of its own if it needs some."""
    global _pair, _lock, _thread
    _lock, _thread = threading.Lock(), None
    if _pair is None:
        return
    with suppress(ValueError):  # this is not the main thread of an interpreter
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, _pair[1].fileno()):
            signal.set_wakeup_fd(before)
    _tell_core(False)
    for end in _pair:
        end.close()
    _pair = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _attend() -> None:
    """What the thread does: tell the compiled core of every signal, and end waits at SIGINT."""
    end = _ends()[0]
    while numbers := end.recv(4096):
        core: Any = native()
        if core is not None:
            core.signals_have_come()
        if signal.SIGINT in numbers:
            end_call_of_main_thread()


@contextmanager
def ending(end: Callable[[], None]) -> Iterator[None]:
    """While this lasts in the main thread, SIGINT calls ``end``, from another thread; it makes the wait fail."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listen()
    _enders.append(end)
    try:
        yield
    finally:
        _enders.remove(end)


def end_call_of_main_thread() -> None:
    """After SIGINT: make the wait fail that the main thread is in, unless it has taken the signal by itself."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    time.sleep(_MOMENT)
    for end in list(_enders):
        end()
    for group in {id(group): group for group in _groups_of_main_thread()}.values():
        for resource in resources.held(group):
            resource.abort()
        try:
            transport.abort(group)
        except RuntimeError as error:
            _log.warning("tpkernels: the call on group %r could not be interrupted: %s", group.name, error)


def _groups_of_main_thread() -> Iterator[Group]:
    """Groups whose calls the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("tpkernels.ops."):
            group = frame.f_locals.get("group")
            if isinstance(group, Group) and _is_in_a_call(group):
                yield group
        frame = frame.f_back


def _is_in_a_call(group: Group) -> bool:
    if group.lock.acquire(blocking=False):
        group.lock.release()
        return False
    return True
