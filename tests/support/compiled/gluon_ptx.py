"""Checks, in PTX, that a role arrives at a barrier only when all its threads are done with what it hands on.

One thread of a role arrives for all of them. PTX orders what the others read and wrote before that arrival only by a
barrier between: `bar.sync` among warps, `bar.warp.sync` in a role of one warp. ptxas makes no instruction of the latter
where the lanes are together, so that tools which look at the machine code, as racecheck does, miss it.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

_ARRIVE = re.compile(r"mbarrier\.arrive\.shared::cta\.b64")
_ACCESS = re.compile(r"\b(?:ld|st|red|atom)\.shared|\b(?:ld|st)matrix\.")
_NAMED_ARRIVE = re.compile(r"\bbar\.arrive %\w+, (%\w+);")
_CONSTANT = re.compile(r"mov\.b32\s+(%\w+), (\d+);")
_TURN = 256  # threads of two consumers, see gluon_pipeline.py: a turn is passed on while products run
_BLOCK = re.compile(r"^\$L__BB|^\s+(?:@\S+ )?bra\b")


def early_arrivals(ptx: str) -> Iterator[str]:
    """Arrivals without a barrier of the role between them and what it did before, in their own basic block."""
    lines = [line.split("//")[0].rstrip() for line in ptx.splitlines()]
    starts = [0, *(i for i, line in enumerate(lines) if "setmaxnreg" in line), len(lines)]
    for start, end in pairwise(starts):
        role = lines[start:end]
        barrier = "bar.sync" if any("wgmma" in line for line in role) else "bar.warp.sync"
        for i, line in enumerate(role):
            if _ARRIVE.search(line) and not _is_behind(role[:i], barrier):
                yield f"{start + i + 1}: {line.strip()}"


def arrivals_in_flight(ptx: str) -> Iterator[str]:
    """Arrivals, by name too, of a consumer that has issued wgmma and not waited for any since: follows the text."""
    turns = {register for register, value in _CONSTANT.findall(ptx) if int(value) == _TURN}
    has_issued = False
    for number, line in enumerate(ptx.splitlines(), 1):
        if "setmaxnreg" in line or "wgmma.wait_group" in line:
            has_issued = False
        elif "wgmma.commit_group" in line:
            has_issued = True
        named = _NAMED_ARRIVE.search(line)
        if has_issued and (_ARRIVE.search(line) or (named and named[1] not in turns)):
            yield f"{number}: {line.strip()}"


def num_arrivals(ptx: str) -> int:
    return len(_ARRIVE.findall(ptx)) + len(_NAMED_ARRIVE.findall(ptx))


def _is_behind(before: list[str], barrier: str) -> bool:
    for line in reversed(before):
        if barrier in line:
            return True
        if _ACCESS.search(line) or _BLOCK.search(line):
            return False
    return False
