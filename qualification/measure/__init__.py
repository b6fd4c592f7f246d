"""Measuring evidence: hostile inputs, checks, planted faults, timings, memory traffic."""
