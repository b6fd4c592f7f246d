"""The forward pass computed plainly, from a ModelConfig and a checkpoint's own tensors: what a served model is held to.

Written from the published definitions: nothing here is imported from `kernels/` or `server/`.
"""
