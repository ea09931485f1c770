"""Ranks hold equal weights before these are cut: they compare, and then take the first rank's or refuse.

It owns the comparison (names, shapes, dtypes; fingerprints of the values; the state of torch's default generators), and
what ``init_weights`` means.

::

    "rank 0"    what differs is broadcast from the first rank, as torch's parallelize_module does (src_data_rank=0)
    "same"      ranks that differ raise ValueError, all of them, and nothing is changed

Every module of :mod:`tpkernels.nn` compares the weights that it cuts or replicates, with one exchange per tensor;
:func:`init_weights` says what happens where they differ.  ``tpk.parallelize`` compares a whole model in one exchange
instead.

The generators count because replicated regions draw equal dropout masks only from generators in step, see
:mod:`tpkernels.nn.random`.  Under "rank 0", those of a tensor-parallel group continue with its first rank's state.

Values on the meta device are not compared, because there are none.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import Group, resolve
from tpkernels.nn.digests import bytes_of, distinct_elements, fingerprint
from tpkernels.ops.mesh_exchange import broadcast, exchange_bytes, exchange_over

__all__ = ["Comparison", "check_mode", "compare", "compared", "equal_on_ranks", "init_weights"]

MODES = ("rank 0", "same")
NAMED = 3
"""So many names an error tells; the rest is a number."""
_WEIGHT = "a weight"
_FORMAT = "<q?16s16s16s"
_mode: ContextVar[str | None] = ContextVar("init_weights", default="rank 0")


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"init_weights must be one of {list(MODES)}, got {mode!r}")


@contextmanager
def init_weights(mode: str) -> Iterator[None]:
    """Modules made inside take rank 0's weights where ranks differ ("rank 0", the default), or refuse them ("same").

    ::

        with tpk.nn.init_weights("same"):
            layer = tpk.nn.ColumnParallelLinear.from_linear(linear, mesh)

    Examples:
        >>> linear = nn.Linear(8, 32)  # the ranks share one seed, so that its weights are the same
        >>> with tpk.nn.init_weights("same"):
        ...     layer = tpk.nn.ColumnParallelLinear.from_linear(linear, mesh["tp"])

    Raises:
        ValueError: another mode; inside, with "same", weights or random generators that differ.
    """
    check_mode(mode)
    before = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(before)


@contextmanager
def compared() -> Iterator[None]:
    """Inside, modules do not compare what they cut, because it is known to be equal on all ranks."""
    before = _mode.set(None)
    try:
        yield
    finally:
        _mode.reset(before)


class _Said(NamedTuple):
    """What each rank sends first, in a fixed number of bytes."""

    rank: int
    failed: bool
    layout: bytes
    values: bytes
    generators: bytes

    def pack(self) -> bytes:
        return struct.pack(_FORMAT, *self)

    @classmethod
    def unpack(cls, data: bytes) -> _Said:
        return cls(*struct.unpack(_FORMAT, data))


@dataclass(frozen=True)
class Comparison:
    """What differs between the ranks, equal on all of them."""

    what: str
    groups: tuple[Group, ...]
    tensors: Mapping[str, Tensor]
    ranks: tuple[int, ...] = ()
    """Which ranks hold other values than the first."""
    generators: Group | None = None
    """This rank's group, if the generators of its ranks are out of step."""
    on_gpu: bool = False
    """Whether those are the current GPU's, too."""

    def take_first(self) -> None:
        """Write the first rank's values into the tensors that differ, and into the generators."""
        for name, tensor in self.tensors.items():
            data = bytes_of(tensor)
            broadcast(self.groups, f"{self.what}: {name}", data)
            target = distinct_elements(tensor).detach()
            if data.data_ptr() != target.data_ptr():
                target.copy_(data.view(target.dtype).view(target.shape))
        if self.generators is not None:
            state = _generator_state(self.on_gpu)
            broadcast([self.generators], f"{self.what}: random generators", state)
            _set_generator_state(state, self.on_gpu)

    def refuse(self) -> None:
        """Raise if anything differs."""
        if self.tensors:
            raise ValueError(
                f'{self.what}, init_weights="same": rank(s) {list(self.ranks)} hold other values than the first rank '
                f"in {_listing(list(self.tensors))}. Seed all ranks alike, load the same weights on all of them, or "
                'let init_weights="rank 0" take the first rank\'s'
            )

    def report(self, stacklevel: int) -> None:
        """Warn, on the first rank, that the others' values were replaced."""
        if self.tensors and all(group.rank == 0 for group in self.groups):
            warnings.warn(
                f"{self.what}: rank(s) {list(self.ranks)} held other values than rank 0 in "
                f'{_listing(list(self.tensors))}; all ranks have rank 0\'s now (init_weights="rank 0")',
                stacklevel=stacklevel + 1,
            )


def compare(
    what: str,
    groups: Sequence[Group],
    tensors: Mapping[str, Tensor],
    *,
    mode: str,
    generators: Group | None = None,
    error: Exception | None = None,
) -> Comparison:
    """Compare ``tensors`` over the ranks that ``groups``, the axes of a mesh, lead to; one exchange if all is equal.

    Args:
        generators: the group whose ranks' default generators must be in step.
        error: why this rank cannot go on; raised here on this rank, and ValueError on the others.

    Raises:
        ValueError: on every rank: names, shapes, dtypes or ``requires_grad`` differ; with "same" values or generators.
    """
    layout: dict[str, str] = {}
    prints: list[int] = []
    if error is None:
        layout = {name: _layout(tensor) for name, tensor in tensors.items()}
        prints = [fingerprint(tensor) if _has_values(tensor) else 0 for tensor in tensors.values()]
    on_gpu = generators is not None and _draws_on_gpu(generators, tensors)
    digest = b"" if generators is None else _digest(_generator_state(on_gpu).numpy().tobytes())
    mine = _Said(dist.get_rank(), error is not None, _hash(layout), _hash(prints), digest)
    rows = map(_Said.unpack, exchange_bytes(groups, what, mine.pack()))
    said = {one.rank: one for one in sorted(rows)}
    if any(one.failed for one in said.values()):
        texts = {rank: one["of"] for rank, one in exchange_over(groups, what, {"of": error and str(error)}).items()}
        if error is not None:
            raise error
        raise ValueError(f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in texts.items() if text))
    if len({one.layout for one in said.values()}) > 1:
        _refuse_layouts(what, {rank: one["of"] for rank, one in exchange_over(groups, what, {"of": layout}).items()})
    peers = [] if generators is None else dist.get_process_group_ranks(generators.pg)
    out_of_step = len({said[rank].generators for rank in peers}) > 1
    differing: dict[str, Tensor] = {}
    others: tuple[int, ...] = ()
    if len({one.values for one in said.values()}) > 1:
        every = {rank: one["of"] for rank, one in exchange_over(groups, what, {"of": prints}).items()}
        first = next(iter(every.values()))
        others = tuple(rank for rank, one in every.items() if one != first)
        columns = zip(tensors.items(), zip(*every.values(), strict=True), strict=True)
        differing = {name: tensor for (name, tensor), values in columns if len(set(values)) > 1}
    found = Comparison(what, tuple(groups), differing, others, generators if out_of_step else None, on_gpu)
    if mode == "same":
        found.refuse()
        _refuse_generators(what, said, groups, out_of_step)
    return found


def equal_on_ranks(full: Tensor, mesh: DeviceMesh, *, tp_axis: int = 0) -> Tensor:
    """``full`` as all ranks of ``mesh`` are to have it: itself, or a copy of the first rank's.

    Raises:
        ValueError: as :func:`compare`, under the mode that :func:`init_weights` has set.
    """
    mode = _mode.get()
    if mode is None or mesh.size() == 1 or not _has_values(full):
        return full
    groups = [resolve(mesh.get_group(axis)) for axis in range(mesh.ndim)]
    found = compare("weights of tensor-parallel layers", groups, {_WEIGHT: full}, mode=mode, generators=groups[tp_axis])
    if not found.tensors and found.generators is None:
        return full
    if found.tensors and all(group.rank == 0 for group in groups):
        warnings.warn(
            "tensor-parallel layers were made of weights that differ between ranks; all ranks have rank 0's now "
            "(tpk.nn.init_weights says what happens). Seed all ranks alike, or load the same weights",
            stacklevel=2,
        )
    mine = {name: tensor.detach().clone() for name, tensor in found.tensors.items()}
    replace(found, tensors=mine).take_first()
    return mine.get(_WEIGHT, full)


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _layout(tensor: Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    where = where if _has_values(tensor) else " on the meta device"
    trained = " with gradient" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{where}{trained}"


def _hash(value: object) -> bytes:
    return _digest(json.dumps(value).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _listing(names: Sequence[str]) -> str:
    more = "" if len(names) <= NAMED else f" and {len(names) - NAMED} more"
    return f"{len(names)} tensor(s): {', '.join(names[:NAMED])}{more}"


def _refuse_layouts(what: str, layouts: Mapping[int, Mapping[str, str]]) -> None:
    names = dict.fromkeys(name for layout in layouts.values() for name in layout)
    lines = []
    for name in names:
        sides: dict[str, list[int]] = {}
        for rank, layout in layouts.items():
            sides.setdefault(layout.get(name, "absent"), []).append(rank)
        if len(sides) > 1:
            lines.append(f"{name} is " + ", ".join(f"{text} on rank(s) {ranks}" for text, ranks in sides.items()))
    if not lines:
        lines = ["the same tensors come in another order"]
    more = "" if len(lines) <= NAMED else f"; and {len(lines) - NAMED} more"
    raise ValueError(f"{what}: the ranks hold different tensors: {'; '.join(lines[:NAMED])}{more}")


def _refuse_generators(what: str, said: Mapping[int, _Said], groups: Sequence[Group], out_of_step: bool) -> None:
    """Raise on every rank if the generators of any tensor-parallel group are out of step."""
    if len({one.generators for one in said.values()}) == 1:
        return
    if any(one["of"] for one in exchange_over(groups, what, {"of": out_of_step}).values()):
        digests = {rank: one.generators.hex()[:8] for rank, one in said.items()}
        raise ValueError(
            f'{what}, init_weights="same": the random generators of the ranks differ (digests by rank: {digests}), so '
            "that replicas would drop out different elements. Call torch.manual_seed with one number on all ranks of a "
            'tensor-parallel group, or let init_weights="rank 0" set them'
        )


def _draws_on_gpu(group: Group, tensors: Mapping[str, Tensor]) -> bool:
    """Whether masks may be drawn on the current GPU, from facts that are equal on all ranks or refused: a group of
    gloo serves CUDA tensors, and where those lie is part of what is compared first."""
    return group.backends.own_device == "cuda" or any(_is_on_gpu(tensor) for tensor in tensors.values())


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and _has_values(tensor)


def _generator_state(on_gpu: bool) -> Tensor:
    """The state of torch's default generator, followed on GPUs by that of the current device's."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if on_gpu else state


def _set_generator_state(state: Tensor, on_gpu: bool) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if on_gpu:
        torch.cuda.set_rng_state(state[size:].clone())
