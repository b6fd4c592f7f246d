"""The folder of `qualification/matrices/` that holds a GPU's matrix files."""

import re


def gpu_folder(gpu: str) -> str:
    """Return the folder's name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unnamed"
