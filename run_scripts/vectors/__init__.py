"""Vectors of a corpus, and what they show: nearest neighbors of a word's uses, and word senses."""
