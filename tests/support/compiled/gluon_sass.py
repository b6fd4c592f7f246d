"""Facts of a Gluon kernel's machine code: spills, wgmma, and the instructions while one is in flight."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from triton import knobs

_HGMMA = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), (?:R(\d+)(?:\.reuse)?, )?gdesc")
_NEW_BARRIER = re.compile(r"SYNCS\.EXCH\.64 URZ, \[(UR\d+)(?:\+(0x[0-9a-f]+))?\]")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
_BRANCH = re.compile(r"BRA.* `\((\.L_\w+)\)")
_NO_RESULT = ("ST", "BAR", "SYNCS", "BRA", "WARPGROUP", "UTMA", "RED", "NOP", "EXIT")
_WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2}


def disassemble(cubin: bytes) -> list[str]:
    """One instruction a line, in the order of the code."""
    return instructions(labelled_code(cubin))


def instructions(labelled: list[str]) -> list[str]:
    return [line for line in labelled if not line.endswith(":")]


@lru_cache(maxsize=1)  # several checks of one kernel ask for it, which takes as long as ptxas did
def labelled_code(cubin: bytes) -> list[str]:
    """One instruction or label a line, in the order of the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.finditer(r"^(?:\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;|\s*(\.L_\w+:))", text, re.MULTILINE)
    return [each[1] or each[2] for each in found]


def count(code: list[str], opcode: str) -> int:
    return sum(opcode in line for line in code)


def spills_in_product_loop(labelled: list[str]) -> int:
    """Return the loads and stores of spilled registers in the shortest loop that multiplies by wgmma."""
    places = {line: index for index, line in enumerate(labelled) if line.endswith(":")}
    loops = []
    for end, line in enumerate(labelled):
        target = _BRANCH.search(line)
        if target is not None and (start := places.get(f"{target[1]}:", end)) < end:
            loops.append(labelled[start:end])
    shortest = min((it for it in loops if count(it, "HGMMA")), key=len)
    return count(shortest, "STL") + count(shortest, "LDL")


def barrier_offsets(code: list[str]) -> list[int]:
    """Return where in shared memory mbarriers are initialised, in bytes from the register that most are named from."""
    named = [match for line in code if (match := _NEW_BARRIER.search(line))]
    base = Counter(match[1] for match in named).most_common(1)[0][0]
    return [int(match[2] or "0", 16) for match in named if match[1] == base]


def overlapped_exponentials(code: list[str]) -> list[int]:
    """Exponentials from the first wgmma to the wait for all of them, each time: what the tensor cores work beside."""
    counts, in_flight = [], None
    for line in code:
        if wait := _WAIT.search(line):
            if wait[1] == "0" and in_flight is not None:
                counts.append(in_flight)
                in_flight = None
        elif "HGMMA" in line and in_flight is None:
            in_flight = 0
        elif in_flight is not None and "MUFU.EX2" in line:
            in_flight += 1
    return counts


def hazards(code: list[str]) -> Iterator[str]:
    """Instructions that write a register which a wgmma in flight reads, or touch one it accumulates into.

    Follows the text of the code, not its branches: here each loop ends with nothing in flight.
    """
    groups: list[tuple[set[int], set[int]]] = []  # (registers read, accumulators) of each group in flight
    is_open = False  # whether the last group still grows: its last wgmma carries gsb0
    for line in code:
        instruction = re.sub(r"^@!?U?P\w+ ", "", line)
        if match := _HGMMA.match(instruction):
            if not is_open:
                groups.append((set(), set()))
            is_open = "gsb0" not in instruction
            reads, accumulators = groups[-1]
            accumulators.update(range(int(match[2]), int(match[2]) + int(match[1]) // 2))
            if match[3]:
                reads.update(range(int(match[3]), int(match[3]) + 4))
        elif match := _WAIT.match(instruction):
            left = int(match[1])
            groups = groups[len(groups) - left :] if left else []
        elif groups:
            reads = set().union(*(group[0] for group in groups))
            accumulators = set().union(*(group[1] for group in groups))
            named = {int(register) for register in re.findall(r"\bR(\d+)", instruction)}
            if _written(instruction) & reads or named & accumulators:
                yield line


def _written(instruction: str) -> set[int]:
    opcode, _, operands = instruction.partition(" ")
    register = re.match(r"(?:U?PT?\d?, )?R(\d+)", operands)
    if register is None or opcode.startswith(_NO_RESULT):
        return set()
    width = next((count for suffix, count in _WIDTHS.items() if suffix in opcode), 1)
    return set(range(int(register[1]), int(register[1]) + width))
