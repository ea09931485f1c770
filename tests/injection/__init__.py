"""The n-th system call or allocation fails, for every n; and what is left of a save that is cut short anywhere."""
