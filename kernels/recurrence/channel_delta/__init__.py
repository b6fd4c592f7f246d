"""The delta rule with a decay of each channel (Kimi Delta Attention): weights, kept tensors, by PyTorch and Triton."""
