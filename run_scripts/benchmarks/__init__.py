"""Measurements of speed, each behind a check that the measured code is correct."""
