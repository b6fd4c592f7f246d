"""Models small enough for a test."""
