"""Measurements of speed and memory, each after a correctness check."""
