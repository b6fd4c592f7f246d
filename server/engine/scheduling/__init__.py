"""What the next step computes, and what became of the last one. No tensor in here."""
