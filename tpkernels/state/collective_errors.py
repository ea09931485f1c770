"""What the ranks of a model find out and decide together, so that a mistake of one of them is an error on all.

It owns how ranks run a step that may fail on some of them only (a file that one cannot read), and how they compare what
they found.  It assumes that all ranks of the model take the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.comm.groups import Group, GroupLike, resolve
from tpkernels.errors import CommunicationError
from tpkernels.nn.digests import MODULUS, digest_of
from tpkernels.ops.mesh_exchange import exchange_over
from tpkernels.state.originals import Original, meshes_of

__all__ = ["Ranks", "add_up", "check_same"]

_ADVICE = (
    "State is saved and loaded by all ranks together: call model.state_dict(), load_state_dict() and tpk's functions "
    "for state on every rank, whichever then writes; tpk.full_state_dict(model, rank=0) gives rank 0 alone the tensors"
)
T = TypeVar("T")
Facts = Mapping[str, Any]


class Ranks:
    """The ranks that a model lives on (every axis of its meshes), or all ranks of the job."""

    def __init__(self, groups: Sequence[GroupLike]) -> None:
        self._groups = [resolve(group) for group in groups]

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        return cls([mesh.get_group(axis) for mesh in meshes_of(model) for axis in range(mesh.ndim)])

    @classmethod
    def all(cls) -> Ranks:
        world = dist.group.WORLD
        assert world is not None
        return cls([world])

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return dist.get_rank()

    @property
    def is_first(self) -> bool:
        return all(group.rank == 0 for group in self._groups)

    def exchange(self, what: str, facts: Facts) -> list[Facts]:
        """Every rank's ``facts``, in rank order.

        Raises:
            GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: a rank did not come, which the message names.
        """
        try:
            return list(exchange_over(self._groups, what, facts).values())
        except CommunicationError as error:
            raise type(error)(f"{error}\n{_ADVICE}", ranks=error.ranks) from error

    def step(self, what: str, work: Callable[[], None]) -> None:
        """Run ``work`` on all ranks; if it fails on one, raise ValueError on all."""
        self.together(what, lambda: (work(), {}))  # type: ignore[func-returns-value]

    def together(self, what: str, work: Callable[[], tuple[T, Facts]]) -> tuple[T, list[Facts]]:
        """This rank's result of ``work`` and what all ranks say about theirs.

        Raises:
            ValueError: it failed on some rank; all ranks raise, and the message is each failing rank's.
        """
        result: T | None = None
        mine: dict[str, Any] = {}
        error: Exception | None = None
        try:
            result, found = work()
            mine = {"facts": dict(found)}
        except Exception as failed:  # noqa: BLE001 - whatever it is, the others are waiting to hear of it
            error = failed
            mine = {"rank": dist.get_rank(), "error": _in_words(failed)}
        said = self.exchange(what, mine)
        errors = {one["rank"]: one["error"] for one in said if "error" in one}
        try:
            if error is not None and not isinstance(error, ValueError | OSError):
                raise error
            if errors:
                raise ValueError(_listing(what, errors, everywhere=len(errors) == len(said))) from error
        finally:
            del error  # its traceback holds this frame
        return result, [one["facts"] for one in said]  # type: ignore[return-value]

    def digests(self, what: str, originals: Iterable[Original]) -> dict[str, int]:
        """Digests of whole tensors by name, from every rank's parts of them."""
        shares: dict[str, int] = {}
        for original in originals:
            for part in original.parts:
                if self.counts(part.tensor):
                    share = digest_of(part.local, original.box(part).offsets)
                    shares[original.name] = (shares.get(original.name, 0) + share) % MODULUS
        return add_up(self.exchange(f"{what}: digests", {"shares": shares}))

    def counts(self, tensor: Tensor) -> bool:
        """Whether this rank adds its part of ``tensor`` to a sum over the ranks: of replicas the first does.

        A tensor may live on one axis of the model's mesh, as what FSDP alone has cut does: the other axes repeat it.
        """
        if not isinstance(tensor, DTensor):
            return self.is_first
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        placed = zip(coordinate, tensor.placements, strict=True)
        if not all(at == 0 for at, placement in placed if placement.is_replicate()):
            return False
        on_mesh = set(mesh.mesh.flatten().tolist())
        return all(group.rank == 0 for group in self._groups if not on_mesh.issuperset(_members(group)))


def _members(group: Group) -> list[int]:
    return dist.get_process_group_ranks(group.pg)


def add_up(said: Sequence[Facts]) -> dict[str, int]:
    """Digests of whole tensors from each rank's share of them."""
    total: dict[str, int] = {}
    for facts in said:
        for key, value in facts["shares"].items():
            total[key] = (total.get(key, 0) + value) % MODULUS
    return total


def check_same(what: str, said: Sequence[Facts], things: str) -> None:
    """Refuse ranks whose facts under ``"same"`` differ."""
    if len({facts["same"] for facts in said}) > 1:
        raise ValueError(f"{what}: the ranks have different {things}: {[facts['same'][:8] for facts in said]}")


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"  # which names the file
    return str(error) if isinstance(error, ValueError) else repr(error)


def _listing(what: str, errors: Mapping[int, str], everywhere: bool) -> str:
    texts = set(errors.values())
    if everywhere and len(texts) == 1:
        return f"{what}: {texts.pop()}"
    return f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items()))
