"""Which groups compute the same bits at every tensor-parallel degree, and up to which degree.

The number stands in the group's state (:meth:`tpkernels.comm.groups.Group.keep_same_bits`), and all ranks of a group
must have the same: it is among the settings that a new signature compares.  What follows from it is in
:mod:`tpkernels.gemm.canonical`.
"""

from __future__ import annotations

from torch.compiler import is_dynamo_compiling

from tpkernels.comm.groups import GroupLike, group_name, groups_of_same_bits, resolve
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import canonical

__all__ = ["anywhere", "refuse", "same_bits_of"]


def anywhere() -> bool:
    """Whether any group of this process may be asked for the same bits: a question that costs nothing."""
    return bool(groups_of_same_bits)


def same_bits_of(group: GroupLike | str) -> int:
    """The largest degree whose bits this group gives; 0 where nothing was asked for.

    Raises:
        UnsupportedProblem: in code that torch.compile traces, or with more than one thread.
    """
    if not groups_of_same_bits:
        return 0
    name = group if isinstance(group, str) else group_name(group)
    if (name.rpartition("@")[0] or name) not in groups_of_same_bits:
        return 0
    if is_dynamo_compiling():
        raise UnsupportedProblem(
            "same_bits is not proven in compiled code, whose kernels depend on the shapes that they were compiled for: "
            "call the model eagerly"
        )
    same_bits = resolve(group).same_bits
    if same_bits:
        canonical.check_threads()
    return same_bits


def refuse(group: GroupLike | str, what: str, why: str) -> None:
    """Raise where ``group`` is to give the same bits, which ``what`` cannot.

    Raises:
        UnsupportedProblem: on every rank that makes this call; nothing was sent.
    """
    same_bits = same_bits_of(group)
    if same_bits:
        raise UnsupportedProblem(f"{what} does not give the same bits at every degree (same_bits={same_bits}): {why}")
