"""Everything between a socket and a route: limits, keys, deadlines, admission."""
