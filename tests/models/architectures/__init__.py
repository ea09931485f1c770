"""Every architecture of the installed transformers, built small, run unsharded and parallelized, and compared.

`catalogue` says what there is, `shrink` and `special` make small models, `inputs` what they are called with, `compare`
runs and judges one of them on the ranks.  `benchmarks/architectures.py` is the command.
"""
