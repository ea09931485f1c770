"""What a gated linear unit does to a cut tensor."""

from __future__ import annotations

from tpkernels.planning.replays.op_call import Call
from tpkernels.planning.splits import Split, Unproven

__all__ = ["halves_of", "glu"]


def halves_of(size: int) -> tuple[int, int]:
    """The values and the gates that the op takes ``size`` features for."""
    return size // 2, size // 2


def glu(call: Call) -> Split:
    """The first half of a dimension, each element times the sigmoid of its partner in the second half."""
    call.same((1, "dim"))
    split, dim = call.cut(), call.value(1, "dim", -1) % call.rank_of()
    if dim != split.dim:
        return split
    half, _ = halves_of(call.whole[0][dim])
    values, _, _ = split.part(0, half, call.world_size, call.rank)
    gates, _, _ = split.part(half, 2 * half, call.world_size, call.rank)
    if values != gates:
        error = Unproven("values and their gates are cut in different ways")
        error.segmented = True
        raise error
    return values
