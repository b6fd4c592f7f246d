"""Bounds of the offsets that a Triton kernel computes in 32 bits, by its IR, under the most that a server computes.

Numbers that a kernel is given or loads have bounds by their names. Sums and products have those of their operands; what
a loop hands on grows by as much in each round as in its second one. A 32-bit number beyond 2^31 - 1 that reaches an
address, widened or not, is reported.
"""

import re
from collections.abc import Sequence

Bounds = tuple[int, int]
INT32: Bounds = (-(2**31), 2**31 - 1)
# Of a server on one H200: 32,768 tokens a step of 1,024 sequences, rows of up to 65,536 numbers, 2^20 tokens of a
# context, 2^26 pages of a pool, 2^18 pairs of a token and an expert. Loaded numbers go by the name of their pointer.
GIVEN = {
    r"stride_(k|v|)_?page": 2**22,
    r"stride_table": 2**20,
    r"stride": 2**16,
    r"num_(tokens|rows)": 2**15,
    r"num_(seqs|writes|parts|splits|blocks|experts|active)": 2**12,
    r"window|vocab": 2**20,
    r"block_m": 2**8,
    r"": 2**18,  # sizes of a layer
}
LOADED = {
    r"page_table": 2**26,
    r"context_lens|positions|firsts|spans": 2**20,
    r"cu_seqlens_k": 2**20,
    r"cu_seqlens_q|starts|stops|folded": 2**15,
    r"expert": 2**10,
    r"": 2**18,  # rows of experts, and places in lists of them
}
PROGRAMS = {"x": 2**18, "y": 2**12, "z": 2**12}  # tiles, tokens or slots; heads or blocks of columns; sequences
COUNTED = (0, 2**18)  # what is summed, or the largest of: rows, tokens, and places in lists of them
_REFERENCE = r"%[\w$.-]+(?:#\d+)?"
_MOVES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.trunci", "ttg.convert_layout")


def narrow_offsets(ttir: str) -> list[str]:
    """Return "pointer <- operation" of each 32-bit number past 2^31 - 1 that reaches an address.

    ttir  of one kernel without calls or loops of unknown length, as Triton's passes leave it
    Raises ValueError for a loop of the latter kind.
    """
    return sorted(_Kernel(ttir).found)


class _Kernel:
    def __init__(self, ttir: str) -> None:
        """Walk the operations of a kernel."""
        self.found: set[str] = set()
        self._bounds: dict[str, Bounds] = {}
        self._pointers: dict[str, str] = {}  # name of the argument that an address is made of
        self._wrapped: dict[str, str] = {}  # operation in which a number passes 2^31 - 1
        lines = [line for line in ttir.splitlines() if line.strip() and not line.startswith("#loc")]
        self._lines = [re.sub(r" loc\(.*$", "", line).strip() for line in lines]
        [start] = [at for at, line in enumerate(self._lines) if line.startswith("tt.func public")]
        [head] = [line for line in lines if "tt.func public" in line]
        for name, kind in re.findall(r"(%\w+): (!tt\.ptr|i\d+)", head):
            if kind == "!tt.ptr":
                self._pointers[name] = name[1:]
            else:
                self._bounds[name] = (0, _named(GIVEN, name))
        self._block(start + 1)

    def _block(self, at: int) -> tuple[int, list[str]]:
        """Walk until a region ends; return that line, and what the region yields."""
        yields: list[str] = []
        while not self._lines[at].startswith("}"):
            line = self._lines[at]
            if re.match(r"(scf\.yield|tt\.\w+\.return)", line):
                yields = re.findall(_REFERENCE, line.split(" : ")[0])
                at += 1
            elif line.endswith("{") or line.endswith("({"):
                at = self._region(at)
            else:
                self._operation(line)
                at += 1
        return at, yields

    def _region(self, at: int) -> int:
        line = self._lines[at]
        results = _results(line)
        if "scf.for " in line:
            return self._loop(at, line, results)
        if "scf.if " in line:
            at, first = self._block(at + 1)
            if "else" in self._lines[at]:
                at, second = self._block(at + 1)
                for result, *sources in zip(results, first, second, strict=True):
                    self._join(result, sources)
            return at + 1
        if "tt.reduce" in line or "tt.scan" in line:
            while not self._lines[at].startswith("})"):
                at += 1
            self._bounds.update(dict.fromkeys(results, COUNTED))
            return at + 1
        raise ValueError(f"an operation of unknown regions: {line}")

    def _loop(self, at: int, line: str, results: Sequence[str]) -> int:
        counter, lo, hi, step = re.findall(_REFERENCE, line.split("scf.for", 1)[1])[:4]
        first, last, least = self._of(lo)[0], self._of(hi)[1], max(1, self._of(step)[0])
        self._bounds[counter] = (first, max(first, last))
        carried = re.findall(rf"({_REFERENCE}) = ({_REFERENCE})", line.partition("iter_args")[2])
        rounds = max(0, last - max(0, first)) // least + 1
        for name, source in carried:
            self._join(name, [source])
        end = at
        for is_second in (False, True):
            before = {name: self._bounds.get(name) for name, _ in carried}
            end, yields = self._block(at + 1)
            for (name, _), source in zip(carried, yields, strict=True):
                self._join(name, [name, source])
                old, new = before[name], self._bounds.get(name)
                if is_second and old is not None and new is not None:
                    self._bounds[name] = (new[0] + (new[0] - old[0]) * rounds, new[1] + (new[1] - old[1]) * rounds)
        self._block(at + 1)  # what is within 32 bits for one round may not be for all
        for result, (name, _) in zip(results, carried, strict=True):
            self._join(result, [name])
        return end + 1

    def _of(self, name: str) -> Bounds:
        return self._bounds.get(name, INT32)

    def _join(self, result: str, sources: Sequence[str]) -> None:
        """Give a result what any of its sources may be."""
        known = [self._bounds[it] for it in sources if it in self._bounds]
        if len(known) == len(sources):
            self._bounds[result] = (min(it[0] for it in known), max(it[1] for it in known))
        for of_sources in (self._pointers, self._wrapped):
            for source in sources:
                if source in of_sources:
                    of_sources[result] = of_sources[source]

    def _operation(self, line: str) -> None:
        results, body = _results(line), line.split(" = ", 1)[-1]
        operation, names = body.split()[0].strip('"'), re.findall(_REFERENCE, body.split(" : ")[0])
        if operation == "tt.addptr":
            self._pointers[results[0]] = self._pointers.get(names[0], "?")
            if names[1] in self._wrapped:
                self.found.add(f"{self._pointers[results[0]]} <- {self._wrapped[names[1]]}")
        elif operation == "arith.extsi" and names[0] in self._wrapped:
            self.found.add(f"64 bits <- {self._wrapped[names[0]]}")
        elif len(results) == 1:
            self._compute(results[0], operation, names, body)

    def _compute(self, result: str, operation: str, names: Sequence[str], body: str) -> None:
        if operation in _MOVES or operation in ("arith.extsi", "arith.extui"):
            self._join(result, names[:1])
            return
        if operation == "arith.select":
            self._join(result, names[1:])
            return
        found = self._value(operation, names, body)
        if found is None:
            return
        self._bounds[result] = found
        if re.search(r"(^|[x ])i32(,|>|$)", body.rsplit(" : ", 1)[-1]) and operation != "arith.cmpi":
            if found[1] > INT32[1]:
                self._wrapped[result] = re.sub(r"_\d+\b", "", f"{result} = {body}")
            else:
                for name in names:
                    if name in self._wrapped:
                        self._wrapped[result] = self._wrapped[name]

    def _value(self, operation: str, names: Sequence[str], body: str) -> Bounds | None:
        if operation == "tt.load":
            kind = re.search(r"!tt\.ptr<i(\d+)>", body)
            return None if kind is None else (0, _named(LOADED, self._pointers.get(names[0], "?")))
        if operation == "arith.constant":
            number = re.search(r"constant (?:dense<)?(-?\d+)>? : ", body)
            return None if number is None else (int(number[1]), int(number[1]))
        if operation == "tt.make_range":
            ends = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", body)}
            return ends["start"], ends["end"] - 1
        if operation in ("tt.get_program_id", "tt.get_num_programs"):
            return 0, PROGRAMS[body.split()[1]]
        if len(names) != 2 or not operation.startswith("arith.") or "f" in operation.removeprefix("arith."):
            return None
        (a, b), (c, d) = map(self._of, names)
        match operation.removeprefix("arith."):
            case "addi":
                return a + c, b + d
            case "subi":
                return a - d, b - c
            case "muli":
                corners = [x * y for x in (a, b) for y in (c, d)]
                return min(corners), max(corners)
            case "divsi" | "divui":
                return min(a, 0), max(b, 0) // max(1, c)
            case "remsi" | "remui":
                return 0, max(0, min(b, d - 1))
            case "maxsi" | "maxui":
                return max(a, c), max(b, d)
            case "minsi" | "minui":
                return min(a, c), min(b, d)
            case "shli":
                return min(a, 0) << max(0, min(d, 32)), max(b, 0) << max(0, min(d, 32))
            case "shrsi" | "shrui":
                return min(a, 0), max(b, 0) >> max(c, 0)
            case "andi":
                return (0, min(b, d)) if min(a, c) >= 0 else (min(a, c, 0), max(b, d, 0))
            case "ori" | "xori":
                return min(a, c, 0), max(b, 0) + max(d, 0)
            case "cmpi":
                return 0, 1
        return None


def _results(line: str) -> list[str]:
    """Return the names that an operation gives its results."""
    if " = " not in line or not line.startswith("%"):
        return []
    found = []
    for name in line.split(" = ", 1)[0].split(", "):
        base, colon, count = name.partition(":")
        found += [f"{base}#{at}" for at in range(int(count))] if colon else [base]
    return found


def _named(table: dict[str, int], name: str) -> int:
    return next(bound for pattern, bound in table.items() if re.search(pattern, name))
