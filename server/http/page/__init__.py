"""The pages at / and /docs: each is one file with its style and its script; nothing is loaded from elsewhere."""
