"""Programs that are one rank of several."""
