"""The order of preference of paths, by name, for readers that cannot import the catalog. Imports no torch."""

from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import Tier, is_for_order

# Starts of the names of the catalog's paths, the most preferred first. PyTorch's kernels are fallbacks on a GPU.
_TIERS = {
    "gluon.linear.fp8.swapped": Tier.FIRST,  # before others of as many rows, as in the catalog
    "gluon.linear.int4.swapped": Tier.FIRST,
    "gluon.": Tier.FIRST,
    "triton.": Tier.FIRST,
    "sdpa.cpu": Tier.FIRST,
    "sdpa.cudnn": Tier.FALLBACK,
    "sdpa.flash": Tier.FALLBACK,
    "sdpa.efficient": Tier.FALLBACK,
    "sdpa.math": Tier.FALLBACK,
    "sdpa.": Tier.FALLBACK,  # of evidence older or newer than this catalog
    "cublaslt.": Tier.FIRST,
    "torch.linear": Tier.FIRST,  # nothing is ahead of it on a CPU, and on a GPU for some sizes
    "torch.experts.cpu": Tier.FIRST,
    "nccl.": Tier.FIRST,  # of many rows; gloo of a CPU
    "gloo.": Tier.FIRST,
    "torch.recurrence.cpu": Tier.FIRST,
    "torch.convolution.cpu": Tier.FIRST,
    "torch.": Tier.FALLBACK,
}
# Both paths of a CPU are PyTorch's own. On a GPU nothing of PyTorch serves uncounted.
_COMPETES_ON = {"sdpa.math": frozenset({Device.CPU})}


def tier_of(path: str) -> Tier:
    """Return the tier of the path of this name; FIRST for one of an order, and for one not in the catalog."""
    if is_for_order(path):
        return Tier.FIRST  # it serves where nothing else may
    return next((tier for start, tier in _TIERS.items() if path.startswith(start)), Tier.FIRST)


def place_of(path: str) -> int:
    """Return where the path stands in the catalog's order, as far as it matters inside a tier."""
    if is_for_order(path):
        return len(_TIERS) + 1
    return next((place for place, start in enumerate(_TIERS) if path.startswith(start)), len(_TIERS))


def competes_on(path: str) -> frozenset[Device]:
    """Return the devices on which a fallback serves before the first tier where it is clearly faster."""
    return _COMPETES_ON.get(path, frozenset())


def is_chosen_by_time(path: str) -> bool:
    """Return whether a path's place inside its tier is its measured time.

    Which kernel multiplies how many rows is chosen by `kernels/linear/hopper/tilings.py` and by measured algorithms,
    which one sums how many rows over ranks by `kernels/collective/most_rows.py`; the catalog has paths of
    both in that order. A path for one order of sums serves where that is asked for, however fast it is.
    """
    return ".linear" not in path and ".collective" not in path and not is_for_order(path)
