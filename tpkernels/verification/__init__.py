"""Verification: a parallel model compared with the unsharded one, and the first module that differs."""
