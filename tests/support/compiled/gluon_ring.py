"""Checks that a role touches the ring of posted tiles only between its wait for a slot and its arrival for it.

Read from PTX and from machine code, where a load that ptxas sank below the arrival would be a race. ptxas gives some of
the loads the line of what uses them, so what racecheck names need not be where the source reads the ring.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = 64  # of a slot at most, and of the shortest ring
_FIRST_READ = re.compile(r"ld\.shared\S*b32\s[^;\n]*\[global_smem\+(\d+)\]")  # consumer 0 takes its first tile
_ACCESS = re.compile(r"\b(ld\.shared|st\.shared|LDS|STS)\S*\s.*\+(0x[0-9a-f]+|\d+)\]")
_WAIT = re.compile(r"mbarrier\.try_wait|SYNCS\.PHASECHK")
_ARRIVE = re.compile(r"mbarrier\.arrive|SYNCS\.(?!PHASECHK)")
_BARRIER = re.compile(r"\bbar\.sync|BAR\.SYNC")  # of all warps of a role
_BORDER = re.compile(r"^\s*(?:\$L__BB|\.L_)\w*:|\bbra\b(?!.* waitLoop)|\b(?:BRA|BRX|CALL|RET|EXIT)\b")
_OFFSET = re.compile(r"\+(0x[0-9a-f]+)\]")
_RETRY = re.compile(
    r"^(\.L_\w+):\n(?:(?!SYNCS|\.L_|.*BRA).*\n)*SYNCS\.PHASECHK.*\n@!P\d BRA `\(\1\)\nBRA `\((\.L_\w+)\)$", re.MULTILINE
)


class Passage(NamedTuple):
    """Accesses between one wait and one arrival.

    joined   whether all warps of the role meet before it arrives
    waited, arrived  where the barriers are, in machine code: bytes from a register
    """

    kind: str
    joined: bool
    waited: str
    arrived: str


def ring_start(ptx: str) -> int:
    """Return where the ring is in shared memory, in bytes."""
    found = _FIRST_READ.search(ptx)
    assert found, "no role reads the ring"
    return int(found[1])


def joined_waits(code: list[str]) -> list[str]:
    """The code without the branch behind a wait to where ptxas repeats it, and the label where that comes back."""
    text = "\n".join(code)
    for retry, back in _RETRY.findall(text):
        if text.count(f"({back})") == 1:
            text = re.sub(rf"^@!P\d BRA `\({re.escape(retry)}\)\n{re.escape(back)}:\n", "", text, flags=re.MULTILINE)
    return text.splitlines()


def passages(lines: list[str], start: int) -> tuple[list[Passage], list[str]]:
    """Return the passages of the ring at `start`, and accesses outside of them; of PTX, or of `joined_waits`."""
    found: dict[int, Passage] = {}
    outside = []
    for i, line in enumerate(lines):
        access = _ACCESS.search(line)
        if access is None or not start <= int(access[2], 0) < start + BYTES:
            continue
        before, met_before = _nearest(lines, range(i - 1, -1, -1))
        after, met_after = _nearest(lines, range(i + 1, len(lines)))
        if met_before or not (_WAIT.search(lines[before]) and _ARRIVE.search(lines[after])):
            outside.append(f"{i + 1}: {line.strip()}")
        else:
            kind = "read" if access[1] in ("ld.shared", "LDS") else "write"
            found[before] = Passage(kind, met_after, _offset(lines[before]), _offset(lines[after]))
    return list(found.values()), outside


def strays(ptx: str, code: list[str]) -> Iterator[str]:
    """Accesses outside of a passage, and what else differs between what PTX says of the ring and what ptxas made."""
    start = ring_start(ptx)
    meant, outside = passages([line.split("//")[0] for line in ptx.splitlines()], start)
    made, also_outside = passages(joined_waits(code), start)
    yield from outside + also_outside
    if sorted(each[:2] for each in meant) != sorted(each[:2] for each in made):
        yield f"{len(meant)} passages in PTX, {len(made)} in machine code"
    reads, writes = ({each[2:] for each in made if each.kind == kind} for kind in ("read", "write"))
    if len(reads) != 1 or writes != {(arrived, waited) for waited, arrived in reads}:
        yield f"read between {reads}, written between {writes}"


def _nearest(lines: list[str], order: range) -> tuple[int, bool]:
    """The next wait, arrival or border of a basic block, and whether a barrier of all warps comes before it."""
    has_met = False
    for i in order:
        if _WAIT.search(lines[i]) or _ARRIVE.search(lines[i]) or _BORDER.search(lines[i]):
            return i, has_met
        has_met = has_met or _BARRIER.search(lines[i]) is not None
    return order.stop + (1 if order.step < 0 else -1), has_met


def _offset(line: str) -> str:
    match = _OFFSET.search(line)
    return match[1] if match else ""
