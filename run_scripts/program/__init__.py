"""What every program shares: its options and errors, text files and results."""
