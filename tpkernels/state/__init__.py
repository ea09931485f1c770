"""State in original names and shapes: state dicts, checkpoints, snapshots, optimizer state, clipping."""
