"""Keras takes its backend when it is first imported, which ``importorskip`` does."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
