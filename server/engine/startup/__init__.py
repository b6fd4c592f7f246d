"""From settings to an engine that is ready: plan, memory, warm-up."""
