"""The page at /: page.html is the whole of it, with its style and its script; nothing is loaded from elsewhere."""
