"""No tensor of a trace stays behind: ``lru_cache`` helpers are emptied after each run, and a check follows each plan.

It owns the record of which caches a run used, and the search for fake tensors that outlive the trace.  Helpers of a
model keep tensors in ``functools.lru_cache`` (tables of positions, anchors).  After a run on fake tensors they would
hand those to the real model.  A cache that a run used and that holds tensors is emptied, real tensors included: the
model computes them again, and every run of a trace starts alike.

Other places can keep a tensor, too: a dict of a module, a class attribute, a closure, an object that a copy of the
model shares with it.  Every fake tensor holds its fake mode, so if the mode is alive when the trace is gone, some place
has kept a tensor.  An entry of a plain dict is taken out, and so is what was appended to a list; any other place is an
error that names it.
"""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["Caches", "FakeTensorLeft", "Watch", "nothing_left"]

_NEVER = 2**31 - 1
DEPTH = 12
"""How deep containers in a cache are searched for tensors; one entry of it is linked to the next."""
_NO_MODELS = {*sys.stdlib_module_names, "torch", "sympy", "numpy", "triton"} - {"__main__"}
"""Libraries whose caches hold no tensors of models; there are hundreds of them."""
_HOLDERS = (Tensor, list, tuple, dict)


class FakeTensorLeft(RuntimeError):
    """Running the model on fake tensors left one where the model would find it."""


class Caches:
    """Every ``functools.lru_cache`` of the process that may be a model's, and how often each was called."""

    def __init__(self) -> None:
        with _thawed():
            found = _all_caches()
        models = [cache for cache in found if _library_of(cache) not in _NO_MODELS]
        self._counts = [(weakref.ref(cache), _calls(cache)) for cache in models]

    def empty(self) -> bool:
        """Empty the caches that were used since the last call and hold tensors; whether there was a real one."""
        real, counts = False, []
        for reference, before in self._counts:
            cache = reference()
            if cache is None:
                continue
            if (now := _calls(cache)) != before:
                tensors = _tensors_in(cache)
                real |= any(not isinstance(tensor, FakeTensor) for tensor in tensors)
                if tensors:
                    cache.cache_clear()
                    now = _calls(cache)
            counts.append((reference, now))
        self._counts = counts
        return real


@functools.lru_cache
def _a_cache() -> None:
    """That the search for caches must find."""


def _all_caches() -> list[Any]:
    """Every ``lru_cache`` of the process.

    An object refers to its type, so the type's referrers are its instances.  To list all objects of the process
    instead would write to each of them, its count of references, and copy most of the memory of a forked process.
    """
    kind = functools._lru_cache_wrapper
    found = [item for item in gc.get_referrers(kind) if type(item) is kind]
    if any(item is _a_cache for item in found):
        return found
    return [item for item in gc.get_objects() if type(item) is kind]  # another Python than CPython from 3.10


def _library_of(cache: Any) -> str:
    return str(getattr(cache, "__module__", "")).partition(".")[0]


def _calls(cache: Any) -> tuple[int, int]:
    info = cache.cache_info()
    return info.hits, info.misses


def _tensors_in(cache: Any) -> list[Tensor]:
    """Tensors among the keys and values of an ``lru_cache``, in containers and in attributes of objects."""
    found: list[Tensor] = []
    seen = {id(cache.__wrapped__), id(getattr(cache, "__dict__", None))}
    todo = [item for item in gc.get_referents(cache) if id(item) not in seen]
    for _ in range(DEPTH):
        after: list[Any] = []
        for item in todo:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, dict | list | tuple | set | frozenset) or type(item).__name__ == "_lru_list_elem":
                after += gc.get_referents(item)
            elif not isinstance(item, type | types.ModuleType | types.FunctionType | nn.Module):
                after += [value for value in getattr(item, "__dict__", {}).values() if isinstance(value, _HOLDERS)]
        todo = after
    return found


class Watch:
    """The caches that there are before a trace, and the fake modes it traces with."""

    def __init__(self) -> None:
        self.caches = Caches()
        self._modes: list[weakref.ref[FakeTensorMode]] = []

    def add(self, mode: FakeTensorMode) -> None:
        self._modes.append(weakref.ref(mode))

    @property
    def alive(self) -> list[weakref.ref[FakeTensorMode]]:
        return [mode for mode in self._modes if mode() is not None]


@contextmanager
def nothing_left() -> Iterator[Watch]:
    """After the block, which tells what it traces with, no fake tensor is alive.

    Raises:
        FakeTensorLeft: one is, in a place where it cannot simply be taken out.
    """
    watch = Watch()
    was_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.freeze()  # a collection then looks at what the trace has made, not at every object of the process
    # What is new stays in the young generations. A collection of all of them would count the few objects that are not
    # frozen, and Python, which compares that with what is new, would then look at every object again and again.
    gc.set_threshold(thresholds[0], _NEVER, _NEVER)
    try:
        try:
            yield watch
        except Exception as error:
            _forget_locals(error)
            _check(watch)
            raise
        _check(watch)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        if was_frozen:
            gc.freeze()


@contextmanager
def _thawed() -> Iterator[None]:
    """Let ``gc`` see all objects within the block; those that were frozen are frozen again afterwards."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if was_frozen:
            gc.freeze()


def _forget_locals(error: BaseException | None) -> None:
    """Clear what the frames of a traceback hold, which is no leftover; the lines stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _check(watch: Watch) -> None:
    for generation in (1, 2):  # copies of models refer to themselves; generations mean something else from Python 3.14
        if watch.alive:
            gc.collect(generation)
    if not watch.alive:
        return
    gc.unfreeze()
    gc.collect()
    places = _search(watch.alive)
    if places:
        raise FakeTensorLeft(
            f"running the model on fake tensors left one in {'; '.join(dict.fromkeys(places))}: the model would use it "
            'in place of a real tensor.  Reset that place or build the model again, and plan with strategy="rules", '
            "which runs nothing"
        )


def _search(modes: list[weakref.ref[FakeTensorMode]]) -> list[str]:
    """The places that keep a fake tensor which cannot be taken out."""
    places: list[str] = []
    for reference in modes:
        mode = reference()
        if mode is None:
            continue
        fakes = _fakes_of(mode)
        for fake in fakes:
            places += _take_out(fake, [fakes])
    return places


def _fakes_of(mode: FakeTensorMode) -> list[FakeTensor]:
    return [item for item in gc.get_objects() if issubclass(type(item), FakeTensor) and item.fake_mode is mode]


def _take_out(item: Any, inside: list[Any]) -> list[str]:
    """Take a fake tensor, or a sequence with one, out of plain dicts and ends of lists; where else it is kept.

    ``inside``: the search's own list, and what ``item`` is part of already.  No closure here may hold what is searched.
    """
    places = []
    holders = gc.get_referrers(item)
    for holder in holders:
        if _is_one_of(holder, inside) or isinstance(holder, types.FrameType):
            continue
        if type(holder) is dict and _owner_of(holder) is None:
            for key in _keys_of(holder, item):
                del holder[key]
        elif type(holder) is tuple and len(inside) < DEPTH:
            places += _take_out(holder, [*inside, holders, item])
        elif type(holder) is list:
            places += _take_out_of_list(holder, [*inside, holders, item])
        else:
            places.append(_describe(holder, item))
    return places


def _is_one_of(item: Any, known: list[Any]) -> bool:
    return any(item is other for other in known) or item is known


def _keys_of(holder: Any, item: Any) -> list[Any]:
    return [key for key, value in holder.items() if value is item]


def _take_out_of_list(holder: list[Any], inside: list[Any]) -> list[str]:
    """Remove what was appended, run after run; a list that is the value of a dict goes with its entry.

    A list of one tensor is a place for one: it would be empty, and the model count on what is in it.
    """
    outers = gc.get_referrers(holder)
    for outer in outers:
        if type(outer) is dict and _owner_of(outer) is None and len(inside) < DEPTH:
            return _take_out(holder, [*inside, outers])
    if len(holder) > 1 and _is_one_of(holder[-1], inside[0]):
        start = len(holder) - 1
        while start and _is_one_of(holder[start - 1], inside[0]):
            start -= 1
        del holder[start:]
    return [_describe(holder, inside[-1])] if _is_one_of(inside[-1], list(holder)) else []


def _owner_of(namespace: dict[Any, Any]) -> Any:
    """The module, class or object whose dict this is, if it is one."""
    for owner in gc.get_referrers(namespace):
        if isinstance(owner, type):
            if any(part is namespace for part in gc.get_referents(owner)):
                return owner
        elif getattr(owner, "__dict__", None) is namespace:
            return owner
    return None


def _describe(holder: Any, fake: Any) -> str:
    """Where in the program ``holder`` is, in words."""
    if isinstance(holder, dict):
        return f"{_name_of(_owner_of(holder))}.{(_keys_of(holder, fake) or ['?'])[0]}"
    if isinstance(holder, types.CellType):
        functions = [item for item in gc.get_objects() if type(item) is types.FunctionType]
        inside = next((f for f in functions if any(cell is holder for cell in f.__closure__ or ())), None)
        return f"the closure of {inside.__module__}.{inside.__qualname__}" if inside is not None else "a closure"
    if isinstance(holder, list | tuple | set):
        for outer in gc.get_referrers(holder):
            if isinstance(outer, dict) and (owner := _owner_of(outer)) is not None:
                return f"{_name_of(owner)}.{(_keys_of(outer, holder) or ['?'])[0]}"
        return f"a {type(holder).__name__}"
    return f"{_name_of(holder)}.{(_keys_of(getattr(holder, '__dict__', {}), fake) or ['?'])[0]}"


def _name_of(owner: Any) -> str:
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}" if kind is owner else f"an object of {kind.__qualname__}"
