"""Planning a batch: a place for what its layers share, given before the first of them is launched."""

from dataclasses import replace

from kernels.calls.batch import AttentionBatch


def plan(batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with plans of its own, empty: a path's `run` finds there what an earlier layer's has made.

    That is all that depends on the batch and not on a layer's numbers: lists of work, scratch memory, tensor maps, and
    launches, which a layer with tensors alike repeats with its own addresses. Lists of work are made on the device from
    the lengths that the batch has then. So as long as it is used its tensors must not change, and calls come one after
    another on one stream. A CUDA graph plans inside of its capture, so that each replay makes the lists again.
    """
    return replace(batch, plans={})
