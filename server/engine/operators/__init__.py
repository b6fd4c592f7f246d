"""Each operator in an engine: which path serves a call, what was launched, what is quarantined or taken out."""
