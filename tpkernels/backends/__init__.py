"""Implementations of the ops; importing this package registers them, in the order in which ``explain`` lists them."""

from tpkernels.backends import unfused  # noqa: I001  (the order is that of the listing)
from tpkernels.backends import chunked
from tpkernels.backends import shared_memory
from tpkernels.backends import symmetric

__all__ = ["chunked", "shared_memory", "symmetric", "unfused"]
