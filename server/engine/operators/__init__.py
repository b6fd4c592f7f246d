"""What attention, products and experts share in an engine: decisions that change in service, and failed launches."""
