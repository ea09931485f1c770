"""Prove a tensor-parallel swap: ranks for tests, elementwise fp64 bounds, distinct payloads, seeded faults.

Public on purpose: users check their own models and kernels with what this project checks itself with.
`spawn` runs functions on persistent ranks, `cases` makes operands and calls ops, `references` says what must come out,
`numeric` judges values, `faults` shows that the judge is awake.
"""
