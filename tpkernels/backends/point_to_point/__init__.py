"""``unfused`` and ``chunked``: chunks between pairs of ranks, over any process group of c10d."""

from tpkernels.backends.point_to_point import unfused  # noqa: I001  (the order is that of the listing)
from tpkernels.backends.point_to_point import chunked
from tpkernels.backends.point_to_point import grouped
from tpkernels.backends.point_to_point import dealt

__all__ = ["chunked", "dealt", "grouped", "unfused"]
