"""Text: from words to tokens, and an encoder that trains under vmap."""
