"""Build entry point: owns nothing but the call into setuptools; everything declarative is in pyproject.toml.

It must not import torch: under build isolation torch is not there. Native code will live in `csrc/` and know nothing
of torch either, so its extension module is declared in this file, against a plain compiler.
"""

from setuptools import setup

setup()
