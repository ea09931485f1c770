"""``symmetric``: memory that all GPUs of a host address, kernels and copy engines that work on it."""

from tpkernels.backends.symmetric import grouped, implementations

__all__ = ["grouped", "implementations"]
