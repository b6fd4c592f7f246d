"""PTX that takes 4-bit codes apart: two units of two words, in the order of bit_order.py, become pairs of bf16 numbers.

$0 to $15    the numbers: pair i of word w is $(4 * i + w)
$16 to $19   the words: $16 and $17 are a unit, $18 and $19 another
$20 to $23   of each word the bits of bf16 of 2^126 times its scale, twice

A code's sign, exponent and mantissa in the places of bf16's are the number times 2^-126, subnormal ones too. A scale
above 2, or NaN, has no such factor: where there may be one, numbers are multiplied by 2^126 first, then by the scales.
To look for one here would take 39 instructions in 267, and 10% of the time of 8 tokens.
"""

from collections.abc import Iterable

from kernels.experts.bit_order import KEPT, LAST_ROTATIONS, PATTERN, ROTATIONS, SHARED_ROTATION

_MERGE = "0xE4"  # lop3's table of (a & c) | (b & ~c)


def _pattern(word: str, rotation: int) -> list[str]:
    """t: a pair of a word, as two bf16 numbers."""
    if rotation == 0:
        return [f"and.b32 t, {word}, {PATTERN:#x};"]
    return [f"shf.r.wrap.b32 t, {word}, {word}, {rotation};", f"and.b32 t, t, {PATTERN:#x};"]


def _unit(first: int, factors: tuple[str, str], *, before: str = "") -> list[str]:
    """A unit's pairs, times `before` if there is one, times the factor of their word. first: index of its word a."""

    def pair(i: int, word: int, source: str, rotation: int) -> list[str]:
        multiplied = [f"mul.bf16x2 t, t, {before};"] if before else []
        return [*_pattern(source, rotation), *multiplied, f"mul.bf16x2 ${4 * i + first + word}, t, {factors[word]};"]

    words = f"${16 + first}", f"${17 + first}"
    lines = [line for word in (0, 1) for i, by in enumerate(ROTATIONS) for line in pair(i, word, words[word], by)]
    lines += [
        f"shf.l.wrap.b32 t, {words[1]}, {words[1]}, {SHARED_ROTATION};",
        f"lop3.b32 v, {words[0]}, t, {KEPT:#x}, {_MERGE};",
    ]
    return lines + [line for word, by in enumerate(LAST_ROTATIONS) for line in pair(3, word, "v", by)]


def _scale(word: int, factor: str) -> list[str]:
    """The scale itself of a word, twice; 2^-127 is subnormal, and 255 is NaN."""
    return [
        f"sub.u32 t, ${20 + word}, 0x3F003F00;",
        "setp.eq.u32 p, t, 0;",
        f"selp.b32 {factor}, 0x00400040, t, p;",
        "setp.eq.u32 p, t, 0x7F807F80;",
        f"selp.b32 {factor}, 0x7FC07FC0, {factor}, p;",
    ]


def _of_large_scales(first: int) -> list[str]:
    scales = [line for word, factor in enumerate(("f", "g")) for line in _scale(first + word, factor)]
    return scales + _unit(first, ("f", "g"), before="c")


def _text(registers: str, lines: Iterable[str]) -> str:
    return "\n".join(["{", f".reg .b32 {registers};", *lines, "}"])


UNPACK = _text("t, v", [line for first in (0, 2) for line in _unit(first, (f"${20 + first}", f"${21 + first}"))])
UNPACK_LARGE_SCALES = _text(
    "t, v, f, g, c",
    [".reg .pred p;", "mov.b32 c, 0x7E807E80;", *(line for first in (0, 2) for line in _of_large_scales(first))],
)
REGISTERS = ",".join(["=r"] * 16 + ["r"] * 8)
