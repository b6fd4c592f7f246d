"""Identity of kernels in evidence: the digest of its sources, and the names that a profiler shows."""
