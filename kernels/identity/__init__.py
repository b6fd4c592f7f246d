"""What evidence recognises a kernel by: the digest of its sources, and the names that a profiler shows."""
