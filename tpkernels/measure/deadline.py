"""A limit on every step of a measurement.

A kernel that waits for a peer on the device, as those of other libraries may, holds its process for ever: no exception
reaches a thread that waits for the device. What can end it is the end of the process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STUCK", "deadline"]

STUCK = 75  # the exit status of a process that was ended


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """End this process with status `STUCK` if the block lasts longer, after saying what it was and where it stands."""
    watch = threading.Timer(seconds, _end, (seconds, what))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _end(seconds: float, what: str) -> None:
    print(f"{what} has not ended within {seconds:g} s; this process ends. Its threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(STUCK)
