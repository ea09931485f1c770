"""``symmetric``: memory that all GPUs of a host address, kernels and copy engines that work on it."""

from tpkernels.backends.symmetric import dealt, grouped, implementations

__all__ = ["dealt", "grouped", "implementations"]
