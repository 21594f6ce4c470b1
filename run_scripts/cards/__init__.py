"""Model cards, their figures, and the folders that go to the Hub."""
