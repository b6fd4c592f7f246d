"""Records of an engine, and collectors of spans."""
