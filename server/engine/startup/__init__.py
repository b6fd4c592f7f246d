"""Start of an engine, from settings to ready: plan, memory, warm-up."""
