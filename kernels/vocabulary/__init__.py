"""The words of every operator: shapes, buckets, paths with their limits and refusals, fingerprints."""
