"""Engines in the test's own process."""
