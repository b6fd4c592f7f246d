"""A model's architecture, read from its config.json without torch: one reader for the server and the qualification."""
