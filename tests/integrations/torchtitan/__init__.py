"""torchtitan: our ops in its blocks."""
