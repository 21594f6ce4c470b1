"""Experiments of the paper: arms and seeds, their records, and the page of all tables."""
