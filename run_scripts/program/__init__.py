"""Shared by all programs: options, error messages, and the reading and writing of files."""
