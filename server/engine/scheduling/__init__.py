"""Choice of what the next step computes, and handling of the last step's result. No tensor in here."""
