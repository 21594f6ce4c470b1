"""The tokenizer: words with their characters."""
