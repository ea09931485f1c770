"""Implementations of the ops, a folder per transport; importing this package registers them, in the order in which
``explain`` lists them.  A folder has all that its backend owns."""

from tpkernels.backends import point_to_point  # noqa: I001  (the order is that of the listing)
from tpkernels.backends import shared_memory
from tpkernels.backends import symmetric

__all__ = ["point_to_point", "shared_memory", "symmetric"]
