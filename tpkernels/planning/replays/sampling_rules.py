"""What ops do to a cut tensor that sample it at places of a grid: deformable attention, and what looks up points."""

from __future__ import annotations

from tpkernels.planning.replays.op_call import Call
from tpkernels.planning.splits import Split, Unproven

__all__ = ["grid_sample"]


def grid_sample(call: Call) -> Split:
    """Each image of the batch at the places of its own grid, and each of its channels alike.

    Heads are such images, with grids of their own: both are cut alike.  Channels are sampled at the same places, so
    that a grid for all of them is whole, with a share of its gradient on every rank.
    """
    call.same((2, "interpolation_mode"), (3, "padding_mode"), (4, "align_corners"))
    image, grid = call.splits[:2]
    if image is not None and image.dim == 1 and grid is None:
        call.mix(1)
        return call.cut()
    if image is None or image.dim != 0 or grid != image:
        raise Unproven("images and their grids are not cut alike, by image or by channel")
    return call.cut()
