"""Implementations of the ops; importing this package registers them, in the order in which ``explain`` lists them."""

from tpkernels.backends import unfused  # noqa: I001  (the order is that of the listing)
from tpkernels.backends import chunked

__all__ = ["chunked", "unfused"]
