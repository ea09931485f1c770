"""Triton kernels of the `symmetric` implementation: GEMMs that wait for chunks, or announce them.

Owns: what runs inside one GEMM launch. `tiles.py` is the arithmetic that every kernel shares, `signals.py` waits and
signals, `schedule.py` the order in which tiles are visited, `config.py` how large they are; then one file per kernel.
`known_launches.py` repeats a launch with other operands, at less cost.

Assumes: buffers, pointer tables, signals and epochs that somebody else allocates, and copies that somebody else makes.
Kernels know neither groups nor handles: ranks may be GPUs, several ranks of one GPU, or processes of the interpreter.

Needs the package `triton`; nothing outside the backend imports this package, so tpkernels works without it.
"""
