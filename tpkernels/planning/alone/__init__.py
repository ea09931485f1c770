"""Layers that no proof takes with their neighbours: cut by themselves, and gathered, or left whole."""
