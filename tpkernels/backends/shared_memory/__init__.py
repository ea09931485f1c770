"""``shared_memory``: segments of memory that the ranks of one host share, on CPUs."""

from tpkernels.backends.shared_memory import dealt, grouped, implementations

__all__ = ["dealt", "grouped", "implementations"]
