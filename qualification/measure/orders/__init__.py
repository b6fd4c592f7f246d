"""The check of paths that claim an order: rows that come again in other batches, whose bits must be the same."""
