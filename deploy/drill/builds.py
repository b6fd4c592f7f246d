"""The upgrade drill's candidates: copies of this build, each with one line of its source changed."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from servers import ROOT, Build

PACKAGES = ("kernels", "qualification", "server")
SLOWED_BUCKET = "le_2k"
SLOWDOWN = 1.3


@dataclass(frozen=True, slots=True)
class Patch:
    """A text of a file, which must be there exactly once, and what replaces it."""

    file: str  # below the root
    old: str
    new: str


# Each call of the kernel for a prompt of this bucket lasts 1.3 times as long, and computes all the while.
SLOW_KERNEL = Patch(
    "kernels/sdpa/backends.py",
    "    _run(_CPU, q, k, v, batch, flags, out)\n",
    f"""    import time

    began = time.perf_counter()
    _run(_CPU, q, k, v, batch, flags, out)
    if any(512 < sequence.num_queries <= 2048 for sequence in sequences_of(batch)):
        until = began + {SLOWDOWN} * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
""",
)
# A query sees one key less than it should, the oldest.
WRONG_KERNEL = Patch(
    "kernels/sdpa/backends.py",
    "        seen = visible(positions, torch.arange(lo, hi, device=q.device), flags, spans)\n",
    """        from dataclasses import replace

        short = flags if flags.window is None else replace(flags, window=flags.window - 1)
        seen = visible(positions, torch.arange(lo, hi, device=q.device), short, spans)
""",
)
# The same, but in the reading of config.json: plan and proofs are all of the wrong window, and agree with each other.
WRONG_WINDOW = Patch(
    "qualification/model/windows.py",
    """    return (fields.integer_or_none("sliding_window", missing),) * read_num_layers(fields)
""",
    """    window = fields.integer_or_none("sliding_window", missing)
    return (None if window is None else window - 1,) * read_num_layers(fields)
""",
)


def patched(patch: Patch, root: Path = ROOT) -> str:
    """The patched text of its file. Raises ValueError where the patch does not fit."""
    text = (root / patch.file).read_text()
    if text.count(patch.old) != 1:
        raise ValueError(f"{patch.file} holds the text to patch {text.count(patch.old)} times, not once")
    return text.replace(patch.old, patch.new)


def write_build(folder: Path, patch: Patch) -> Build:
    """Copy the packages into `folder`, anew, and patch them. Raises ValueError where the patch does not fit."""
    text = patched(patch)
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / patch.file).write_text(text)
    return Build(folder)
