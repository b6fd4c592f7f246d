"""Copies of the kernels' sources in which every role stumbles at random, and copies in which one order is lost.

A role sleeps up to 4 us, one time in four, before and after each statement that waits for a barrier, arrives at one or
starts a copy. What barriers order cannot tell; what is right only because one role is slower than another can. A
product is slowed by no sleep: what is given back under one is found in the PTX (gluon_ptx.py).
"""

import re
import shutil
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
SHAKEN = (
    "pipeline", "schedule", "consumer", "consumer_ahead", "window/kernel", "extend/kernel", "decode/kernel",
    "decode/stream",
)  # fmt: skip
SHAKE = '''"""Sleeps for a time that nobody can foresee."""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl


@jit
def shake():
    gl.inline_asm_elementwise(
        """{
        .reg .u32 time, hash, on;
        .reg .pred is_on;
        mov.u32 time, %clock;
        mul.lo.u32 hash, time, 2654435761;
        shr.u32 on, hash, 30;
        setp.eq.u32 is_on, on, 0;
        shr.u32 hash, hash, 8;
        and.b32 hash, hash, 4095;
        @is_on nanosleep.u32 hash;
        mov.u32 $0, 0;
        }""", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )
'''
_IMPORT = "from kernels.hopper.shake import shake\n"
_STATEMENT = re.compile(
    r"^( +)(?:mbarrier\.(?:wait|arrive|expect)|hardware_(?:sync|arrive)|tma\.async_copy\w+)\(.*\)\n", re.MULTILINE
)
_ARRIVAL = "    mbarrier.arrive(ring_free.index(slot), count=1)\n"
_READ = "    row = read(ring, slot * VARIANT.fields)\n"
_CLAIM = "FIRST + fill % STAGES, THREADS)"
Edits = tuple[tuple[str, str], ...]

# name: (file, (what stands there, what a mutant has instead), ...)
MUTANTS: dict[str, tuple[str, Edits]] = {
    "tile posted over one that is read": (
        "schedule",
        (("mbarrier.wait(ring_free.index(slot), ((n // RING) & 1) ^ 1)", "pass"),),
    ),
    "tile read before it is posted": (
        "schedule",
        (("mbarrier.wait(ring_full.index(slot), (n // RING) & 1)", "pass"),),
    ),
    "tile given back before it is read": (
        "schedule",
        ((f"{_ARRIVAL}    return", "    return"), (_READ, _ARRIVAL + _READ)),
    ),
    "queries copied over those in use": (
        "pipeline",
        (("mbarrier.wait(q_free.index(buffer), ((n // Q_BUFFERS) & 1) ^ 1)", "pass"),),
    ),
    "stage filled while it is in use": (
        "pipeline",
        (("mbarrier.wait(free.index(fill % STAGES), ((fill // STAGES) & 1) ^ 1)", "pass"),),
    ),
    "stage filled while it is in use, by name": (
        "pipeline",
        ((f"hardware_sync({_CLAIM}", f"hardware_arrive({_CLAIM}"),),
    ),
    "keys and values read before they are there": (
        "pipeline",
        (("mbarrier.wait(ring[1].index(fill % STAGES), (fill // STAGES) & 1, pred=pred)", "pass"),),
    ),
}  # fmt: skip


def copy_kernels(to: Path, *, shaken: bool = True, mutant: str | None = None) -> Path:
    """`to`, which then holds a copy of kernels/: shaken, and with a mutant's fault."""
    shutil.copytree(KERNELS, to / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    folder = to / "kernels" / "hopper"
    if mutant is not None:
        name, edits = MUTANTS[mutant]
        source = (folder / f"{name}.py").read_text()
        for old, new in edits:
            assert source.count(old) == 1, f"{mutant}: {old!r} is in {name}.py {source.count(old)} times"
            source = source.replace(old, new)
        (folder / f"{name}.py").write_text(source)
    if shaken:
        (folder / "shake.py").write_text(SHAKE)
        for name in SHAKEN:
            shake(folder / f"{name}.py")
    return to


def shake(path: Path) -> None:
    source, count = _STATEMENT.subn(r"\1shake()\n\g<0>\1shake()\n", path.read_text())
    assert count > 0, path
    imports = source.index("from triton.experimental")
    path.write_text(source[:imports] + _IMPORT + source[imports:])
