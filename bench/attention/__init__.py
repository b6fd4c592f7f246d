"""`hallmark bench attention`: kernels beside PyTorch, cuDNN and FlashAttention 3."""
