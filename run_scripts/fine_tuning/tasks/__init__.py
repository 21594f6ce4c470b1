"""The tasks of the paper, and their data and scores."""
