"""Products that sum each row in one order, whatever else is in the batch: in Gluon, by cuBLASLt, by PyTorch."""
