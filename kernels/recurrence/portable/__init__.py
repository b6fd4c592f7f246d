"""The recurrence in Triton, for any GPU of sm_80 or newer: tokens prepared, chunks, what is kept of a sequence."""
