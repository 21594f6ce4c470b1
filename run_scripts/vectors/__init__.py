"""Vectors of a corpus, and what they know: neighbors and senses of words."""
