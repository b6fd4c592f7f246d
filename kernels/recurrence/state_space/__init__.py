"""Mamba2's state space as a recurrence (Dao and Gu 2024): its weights and kept tensors, by PyTorch and by Triton."""
