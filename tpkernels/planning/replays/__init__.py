"""Runs of one rank's part: the same code on parts of the tensors, and the proof that it computes its part."""
