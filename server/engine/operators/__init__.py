"""Common parts of attention, products and experts in an engine: decisions that change in service, failed launches."""
