"""Measuring: timing, the benchmark, timelines, and a network lab to measure in."""
