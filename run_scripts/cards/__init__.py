"""Model cards, tables and figures of results, and the folders that go to the Hub."""
