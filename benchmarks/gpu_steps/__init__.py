"""The steps of `benchmarks/one_gpu.py`, each a module that runs in a process of its own."""
