"""The explorer: what models say about a text, its page in the browser, and the page as a Space."""
