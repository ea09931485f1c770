"""Which ops of a run give what nobody reads: code that computes something and drops it.

SAM 2 multiplies the queries of each token by its keys, head by head, and uses the product nowhere.  Whatever a rank
computes in its place is as good, so that nothing has to be proven of it.

It owns :func:`find_unread`.  An op is read if another one that is read, a layer, or whatever else a run consists of
takes its results; if the model returns them, or if anything but the recording still holds them when the call has ended:
an object that the model's code keeps, such as a cache.  So is every op that writes to a tensor, or gives none, since
these do not show who reads them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tpkernels.planning.runs.events import Event, Mixture, Opaque, Source

__all__ = ["find_unread", "may_write"]


def may_write(func: Any) -> bool:
    """Whether the op may write to a tensor; of batch norms, which write to their running means, schemas do not say."""
    named = {argument.name for argument in func._schema.arguments}
    return func._schema.is_mutable or "running_mean" in named


def find_unread(
    events: Sequence[Event],
    made: Mapping[int, Source],
    kept: Sequence[Any],
    results: Iterable[Source],
    writes: Container[int],
) -> frozenset[int]:
    """The numbers of such ops among ``events``.

    Args:
        made: what made each tensor, by its id.
        kept: all that the recording itself holds of the run.
        results: tensors that the model returns.
        writes: the numbers of ops that write to a tensor.
    """
    read = _events_of(results)
    unread = frozenset(range(len(events))) - _needed(events, read, writes)
    if unread:
        read |= _events_of(made[id(tensor)] for tensor in _held_elsewhere(kept, unread, made))
    return frozenset(range(len(events))) - _needed(events, read, writes)


def _needed(events: Sequence[Event], read: set[int], writes: Container[int]) -> set[int]:
    """Those that are ``read``, directly or by others."""
    needed = set(read)
    for number in reversed(range(len(events))):
        event = events[number]
        is_op = event.layer is None and not isinstance(event.packet, Opaque | Mixture)
        if number in needed or number in writes or not is_op or not event.outputs:
            needed.add(number)
            needed |= _events_of(event.sources)
    return needed


def _events_of(sources: Iterable[Source]) -> set[int]:
    return {source[1] for source in sources if isinstance(source, tuple)}


def _held_elsewhere(kept: Sequence[Any], unread: Container[int], made: Mapping[int, Source]) -> list[Tensor]:
    """The results of ``unread`` ops to which there are more references than those in ``kept``."""
    references: Counter[int] = Counter()
    tensors: list[Tensor] = []
    todo: list[Any] = [kept]
    seen = {id(kept)}
    while todo:
        container = todo.pop()
        for item in container.values() if isinstance(container, dict) else container:
            if isinstance(item, Tensor):
                source = made.get(id(item))
                if isinstance(source, tuple) and source[1] in unread:
                    tensors += [] if id(item) in references else [item]
                    references[id(item)] += 1
            elif isinstance(item, list | tuple | dict) and id(item) not in seen:
                seen.add(id(item))
                todo.append(item)
    item = container = None
    (alone,) = _references([object()])
    counts = zip(tensors, _references(tensors), strict=True)
    return [tensor for tensor, count in counts if count - alone != references[id(tensor)]]


def _references(items: list[Any]) -> list[int]:
    """How many there are to each, that of ``items`` among them."""
    return [sys.getrefcount(item) for item in items]
