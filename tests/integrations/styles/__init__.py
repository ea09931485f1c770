"""Our layers as styles of torch's parallelize_module."""
