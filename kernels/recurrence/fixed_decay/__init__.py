"""Lightning attention as a recurrence (Qin et al. 2024): its weights and kept tensors, by PyTorch and by Triton."""
