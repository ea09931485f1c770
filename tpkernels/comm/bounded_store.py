"""A client of the group's store whose requests end.

c10d's clients wait for an answer without a limit: a store whose host is stopped, or cut off without a word, holds them
for ever, and Python sees no Ctrl-C meanwhile.  Here a thread of ours makes the request, and the one that asks waits for
it as long as it has time.  A request that was not answered is not repeated: another one of the same client waits for
its answer first, but not longer than its own limit after that one was made, so that of many requests to a lost store
only the first one waits.  Whoever asks for the same keys again gets that answer, so that short looks, one after the
other, also see what a store far away says.

What is written carries the code of the job's ranks, and what others have written is left out of what is read
(:mod:`tpkernels.comm.job_identity`), with a warning for each key.

Owns: the threads, a few per process, each of which makes one request at a time.
Assumes: c10d's clients release Python's lock while they wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tpkernels.comm.job_identity import Foreign, Seal
from tpkernels.comm.store_sockets import port_of, root, serves
from tpkernels.comm.transport import TransportFailure

__all__ = ["BoundedStore", "NotEnded", "StoreLost", "StoreSilent", "interruptible"]

# So many keys with foreign records are reported, each once.
_MAX_REPORTED = 100
# A wait that ends so much later than it was to is that of a process that was stopped.
_STOOD_STILL_S = 1.0
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class StoreLost(TransportFailure):
    """The store did not answer in time, or its connection has failed."""


class StoreSilent(StoreLost):
    """It did not answer in time; the answer may still come, or has come since."""


class _Request:
    __slots__ = ("_work", "about", "answer", "ended", "made", "taken")

    def __init__(self, work: Callable[[], Any], about: Hashable = None) -> None:
        self._work, self.about, self.taken = work, about, False
        self.made = time.monotonic()
        self.answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.ended = False

    def make(self) -> tuple[Any, BaseException | None]:
        try:
            return self._work(), None
        except BaseException as error:  # noqa: BLE001 - whoever asked raises it
            return None, error


class _Worker:
    """A thread that makes requests, one after the other."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[_Request] = SimpleQueue()
        threading.Thread(target=self._run, name="tpkernels-store", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._serve(self.requests.get())

    def _serve(self, request: _Request) -> None:
        """A function of its own, so that an idle thread keeps no store alive."""
        answer = request.make()
        request.ended = True
        _idle.append(self)  # before the answer: whoever gets it finds this thread for the next request
        request.answer.put(answer)


_idle: list[_Worker] = []
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


def _start(request: _Request) -> None:
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.requests.put(request)


class NotEnded(TimeoutError):
    """What another thread does has not ended in time; it goes on."""


def interruptible(work: Callable[[], _T], limit: float, undo: Callable[[], object] = lambda: None) -> _T:
    """What ``work`` returns or raises within ``limit`` seconds; another thread does it, so that Ctrl-C ends the wait.

    c10d connects again and again until its time is up, and takes no signal meanwhile. The thread goes on; if ``work``
    succeeds when nobody waits for it any more, it calls ``undo``.

    Raises:
        NotEnded: it takes longer.
    """
    lock, is_awaited, has_value = threading.Lock(), True, False

    def whole() -> _T:
        nonlocal has_value
        value = work()
        with lock:
            has_value = True
            comes_late = not is_awaited
        if comes_late:
            undo()
        return value

    def give_up() -> bool:
        """Whether it has not ended: then what comes of it is undone by whoever does it."""
        nonlocal is_awaited
        with lock:
            is_awaited = False
            return not has_value

    request = _Request(whole)
    _start(request)
    try:
        value, error = request.answer.get(timeout=limit)
    except Empty:
        if give_up():
            raise NotEnded(f"not ended within {limit:.3g} s") from None
        value, error = request.answer.get()  # it ended in this very moment
    except BaseException:
        if not give_up():
            undo()
        raise
    if error is not None:
        raise error
    return cast(_T, value)


class _Client:
    """A connection, and the request that it is making; one at a time."""

    def __init__(self, store: Any, has_spare: bool = False) -> None:
        self.store = store
        self._has_spare = has_spare
        self._lock = threading.Lock()
        self._unanswered: _Request | None = None
        self._cloning: _Request | None = None
        self._failed: str | None = None

    @property
    def is_silent(self) -> bool:
        unanswered = self._unanswered
        return unanswered is not None and not unanswered.ended

    def ask(self, question: Callable[[Any], Any], limit: float, about: Hashable = None) -> Any:
        """``about``: what is asked for, where an answer that was given since it was last asked for serves as well."""
        start = time.monotonic()
        if not self._lock.acquire(timeout=limit):
            raise StoreSilent(f"the group's store did not answer another thread within {limit:.3g} s")
        try:
            if self._failed is not None:
                raise StoreLost(self._failed)
            request = self._asked(about)
            if request is None:
                if self.is_silent and not self._is_answered(limit):
                    self._use_spare()
                store = self.store
                self._unanswered = request = _Request(lambda: question(store), about)
                _start(request)
            value, error = self._answer(request, start, limit)
            request.taken = True
            if error is not None:
                raise error
            return value
        except dist.DistNetworkError as failed:
            # c10d does not connect again, and the next request on such a connection took it up to two seconds.
            self._failed = f"the connection to the group's store failed: {failed}"
            raise StoreLost(self._failed) from failed
        except TransportFailure:
            raise
        except RuntimeError as failed:  # what else c10d raises
            raise StoreLost(f"the group's store failed: {failed}") from failed
        finally:
            self._lock.release()

    @staticmethod
    def _answer(request: _Request, start: float, limit: float) -> tuple[Any, BaseException | None]:
        with suppress(Empty):
            return request.answer.get(timeout=max(0.0, start + limit - time.monotonic()))
        if time.monotonic() - start > limit + _STOOD_STILL_S:  # this process did, and the answer may be under way
            with suppress(Empty):
                return request.answer.get(timeout=min(limit, _STOOD_STILL_S))
        raise StoreSilent(f"the group's store did not answer within {limit:.3g} s")

    def _asked(self, about: Hashable) -> _Request | None:
        """The last request, if nobody has heard its answer and it is about the same."""
        last = self._unanswered
        if last is None or last.taken or about is None or last.about != about:
            return None
        return last if last.ended or not self._has_spare else None

    def _is_answered(self, limit: float) -> bool:
        """Whether the last request's answer came, at the latest so long after it was made; a spare need not wait."""
        last = self._unanswered
        if last is None or self._has_spare:
            return False
        with suppress(Empty):
            last.answer.get(timeout=max(0.0, last.made + limit - time.monotonic()))
            return True
        return False

    def _use_spare(self) -> None:
        if self._has_spare and self._cloning is None:
            self._cloning = _Request(self.store.clone)
            _start(self._cloning)
        if self._cloning is None or not self._cloning.ended:
            raise StoreSilent("the group's store still owes an earlier answer")
        clone, error = self._cloning.answer.get()
        self._cloning = None
        if error is not None:
            raise StoreLost(f"no second connection to the group's store: {error}") from error
        self.store, self._unanswered, self._failed = clone, None, None


class BoundedStore:
    """The requests that this library makes, each with a limit in seconds; any number of threads may ask."""

    def __init__(self, store: Any, limit: float, seal: Seal | None = None) -> None:
        self._client = _Client(store)
        self._limit = limit
        self._seal = seal or Seal("")
        self._reported: set[str] = set()
        self._answered_at = [0.0]

    def within(self, limit: float) -> BoundedStore:
        """The same client for requests that have less time."""
        return self._like_this(self._client, min(limit, self._limit))

    def second(self, limit: float) -> BoundedStore:
        """The same store for another thread, with a connection of its own as soon as this one does not answer.

        c10d's client serves one caller at a time, and c10d itself may wait on it for minutes.  Not before: on a busy
        host to connect took five seconds now and then, in which nobody looked after stuck calls.
        """
        return self._like_this(_Client(self._client.store, has_spare=True), limit)

    def _like_this(self, client: _Client, limit: float) -> BoundedStore:
        view = BoundedStore.__new__(BoundedStore)
        view._client, view._limit, view._seal = client, limit, self._seal
        view._reported, view._answered_at = self._reported, self._answered_at
        return view

    def _ask(self, question: Callable[[Any], Any], about: Hashable = None) -> Any:
        def noted(store: Any) -> Any:
            answer = question(store)
            self._answered_at[0] = time.monotonic()
            return answer

        return self._client.ask(noted, self._limit, about)

    @property
    def answered_at(self) -> float:
        """When this store last answered this process (``time.monotonic``), even if nobody waited any more."""
        return self._answered_at[0]

    @property
    def is_silent(self) -> bool:
        """Whether it owes an answer whose time is up."""
        return self._client.is_silent

    @property
    def is_served_here(self) -> bool:
        """Whether this process serves the store to the others: whether it listens at the store's port."""
        port = port_of(self._client.store)
        return port is not None and serves(port)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda store: store.check(list(keys)), about=tuple(keys)))

    def check_in_root(self, keys: Sequence[str]) -> bool:
        """The same of keys that are not this group's, but the store's."""
        return bool(self._ask(lambda store: root(store).check(list(keys))))

    def set(self, key: str, value: str) -> None:
        sealed = self._seal.close(key, value)
        self._client.ask(lambda store: store.set(key, sealed), self._limit)  # does not wait for an answer

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda store: store.add(key, amount)))

    def texts(self, keys: Sequence[str]) -> dict[str, str]:
        """What ranks of this job have stored under these keys, all of which exist."""
        stored = self._ask(lambda store: store.multi_get(list(keys))) if keys else []
        found: dict[str, str] = {}
        for key, value in zip(keys, stored, strict=True):
            try:
                found[key] = self._seal.open(key, bytes(value))
            except Foreign as error:
                self.report(key, str(error))
        return found

    def report(self, key: str, why: str) -> None:
        """Say once in the log that what is under ``key`` was ignored."""
        if key not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(key)
            _log.warning("tpkernels: a foreign record in the store was ignored: %s%s: %s", self._seal.where, key, why)

    def post(self, notes: Callable[[Any], Mapping[str, str]], *, wait: float) -> None:
        """Set these, in this order, and return when the store has them; it gets them later if it is silent now.

        ``notes`` is asked when the store answers, from another thread, and gets c10d's client.

        Raises:
            StoreLost: it does not have them after ``wait`` seconds, or is silent already.
        """

        def leave(store: Any) -> None:
            sealed = {key: self._seal.close(key, value) for key, value in notes(store).items()}
            for key, value in sealed.items():
                store.set(key, value)
            store.check(list(sealed))  # set() does not wait for an answer

        if self.is_silent:  # c10d's client has a lock of its own: they are sent when it has answered
            store = self._client.store
            _start(_Request(lambda: leave(store)))
            raise StoreSilent("the group's store still owes an earlier answer")
        self._client.ask(leave, min(wait, self._limit))
