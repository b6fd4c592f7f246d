"""The environment variables that change how MKL and oneDNN compute on a CPU.

Both libraries read them by themselves at their first use, and neither torch nor they report their values. This is the
one file besides the command line that reads the environment (tests/test_imports.py holds it to that).
"""

import functools
import os

_VARIABLES = (
    "MKL_ENABLE_INSTRUCTIONS",  # the best instruction set that MKL may use
    "MKL_CBWR",  # the same bits on every instruction set, or with every number of threads
    "MKL_DEBUG_CPU_TYPE",  # another instruction set for AMD, in old versions
    # oneDNN reads each of these under its old prefix too.
    *(
        f"{prefix}_{name}"
        for name in ("MAX_CPU_ISA", "CPU_ISA_HINTS", "DEFAULT_FPMATH_MODE")
        for prefix in ("ONEDNN", "DNNL")
    ),
)


@functools.cache
def library_variables() -> tuple[str, ...]:
    """Return the variables that are set, as NAME=value; read once, as the libraries do."""
    return tuple(f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name))
