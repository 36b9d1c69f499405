"""Text: from words to tokens."""
