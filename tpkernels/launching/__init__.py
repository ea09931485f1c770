"""Starting local ranks, and watching the processes that they run in."""
