"""Vectors of a corpus, the nearest neighbors of a word's uses, and word senses."""
