"""Anything in the place of what files and other processes say: an error, and never a crash, a hang or another error."""
