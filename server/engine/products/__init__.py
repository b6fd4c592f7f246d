"""Products that are decided by shape and path, as attention is: those of a mixture's experts."""
