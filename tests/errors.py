"""Errors that tests expect."""

import pytest


def refused(message, error=ValueError):
    """The block must raise this error, with a message in which the pattern is found."""
    return pytest.raises(error, match=message)
