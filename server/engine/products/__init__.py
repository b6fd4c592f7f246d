"""Products that are decided by shape and path, as attention is: with weights, and of a mixture's experts."""
