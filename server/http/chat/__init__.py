"""A conversation as a prompt, whatever protocol its client speaks: the APIs of others are translated to it."""
