"""PTX that takes 4-bit codes apart: four words of 8 codes each become pairs of bf16 numbers.

$0 to $15    the numbers: codes i and i + 4 of word w, a pair, are $(4 * i + w)
$16 to $19   the words
$20 to $23   of each word the bits of bf16 of 2^126 times its scale, twice

A code's sign, exponent and mantissa in the places of bf16's are the number times 2^-126, subnormal ones too. A scale
above 2, or NaN, has no such factor: where there may be one, numbers are multiplied by 2^126 first, then by the scales.
To look for one here would take 39 instructions in 267, and 10% of the time of 8 tokens.
"""

from collections.abc import Iterable

# Of pair i: how its signs come to their place, and how exponents and mantissas do.
_MOVES = (
    ("shl.b32", 12, "shl.b32", 6),
    ("shl.b32", 8, "shl.b32", 2),
    ("shl.b32", 4, "shr.u32", 2),
    ("", 0, "shr.u32", 6),
)


def _numbers(word: int, factor: str, *, first: str = "") -> str:
    """One word's pairs, times `first` if there is one, times the factor."""
    codes, lines = f"${16 + word}", []
    for i, (move_sign, by, move_rest, rest_by) in enumerate(_MOVES):
        if move_sign:
            lines.append(f"{move_sign} t, {codes}, {by};")
        lines += [
            f"{move_rest} u, {codes}, {rest_by};",
            "and.b32 u, u, 0x01C001C0;",
            f"lop3.b32 t, {'t' if move_sign else codes}, 0x80008000, u, 0xEA;",
            *([f"mul.bf16x2 t, t, {first};"] if first else []),
            f"mul.bf16x2 ${4 * i + word}, t, {factor};",
        ]
    return "\n".join(lines)


def _scale(word: int) -> str:
    """f: the scale itself, twice; 2^-127 is subnormal, and 255 is NaN."""
    return f"""sub.u32 t, ${20 + word}, 0x3F003F00;
setp.eq.u32 p, t, 0;
selp.b32 f, 0x00400040, t, p;
setp.eq.u32 p, t, 0x7F807F80;
selp.b32 f, 0x7FC07FC0, f, p;
"""


def _unpack(lines: Iterable[str]) -> str:
    return "\n".join(["{", ".reg .b32 t, u, f, c;", ".reg .pred p;", *lines, "}"])


UNPACK = _unpack(_numbers(word, f"${20 + word}") for word in range(4))
UNPACK_LARGE_SCALES = _unpack(
    ["mov.b32 c, 0x7E807E80;", *(_scale(word) + _numbers(word, "f", first="c") for word in range(4))]
)
REGISTERS = ",".join(["=r"] * 16 + ["r"] * 8)
