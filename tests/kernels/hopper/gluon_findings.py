"""What the compiled kernels of `gluon.prefill.hopper` and `gluon.extend.hopper` show, and what of it must not be."""

from collections.abc import Mapping
from typing import Any

from gluon_ptx import arrivals_in_flight, early_arrivals, num_arrivals
from gluon_ring import strays
from gluon_sass import count, hazards, instructions, labelled_code, overlapped_exponentials


def findings(kernel: Any) -> dict[str, object]:
    """Of a kernel compiled for sm_90."""
    labelled, ptx = labelled_code(kernel.asm["cubin"]), kernel.asm["ptx"]
    code = instructions(labelled)
    return {
        "shared_bytes": kernel.metadata.shared,
        "spills": count(code, "STL"),
        "wgmma": count(code, "HGMMA"),
        "wgmma_fences": count(code, "WARPGROUP.ARRIVE"),
        "tma_loads": count(code, "UTMALDG"),
        "overlapped": overlapped_exponentials(code),
        "hazards": list(hazards(code)),
        "arrivals": num_arrivals(ptx),
        "arrivals_in_flight": list(arrivals_in_flight(ptx)),
        "early_arrivals": list(early_arrivals(ptx)),
        "strays": list(strays(ptx, labelled)),
    }


def found(code: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, Any]:
    """By case, where there is any."""
    return {name: case[what] for name, case in code.items() if case[what]}


def excess_spills(code: Mapping[str, Mapping[str, Any]], allowed: Mapping[str, int]) -> dict[str, int]:
    """By case, where there are more words than are allowed."""
    excess = {name: case["spills"] - allowed.get(name, 0) for name, case in code.items()}
    return {name: num for name, num in excess.items() if num > 0}
