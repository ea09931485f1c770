"""Which layers are cut together: groups, hypotheses of how to cut them, and the proof of each."""
