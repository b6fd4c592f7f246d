"""Bits of rows as they were first computed, which every later computation of the same rows must repeat."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from qualification.evidence.evidence import Invariance

_DIGITS = 32  # of a digest, in hexadecimal
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(slots=True)
class _Input:
    bits: Tensor  # [rows, ...] integers
    is_seen: Tensor  # [rows] bool


class FirstBits:
    """Rows of several inputs by their number, and how many values of them came out otherwise a second time."""

    def __init__(self, *, ends_early: bool = False) -> None:
        """ends_early: whether one changed value is all that is to be known."""
        self._ends_early = ends_early
        self._inputs: dict[str, _Input] = {}
        self._compared = 0
        self._changed = 0
        self._where = ""

    def meet(self, name: str, num_rows: int, rows: Tensor, found: Tensor, where: str) -> None:
        """Keep rows that are met for the first time, and compare all others.

        num_rows  of the whole input
        rows      [n] int64: which of them were computed, some perhaps twice
        found     [n, ...]: what was computed
        where     the batch, for people
        """
        if not rows.numel():
            return
        bits = found.contiguous().view(_INTEGERS[found.element_size()])
        known = self._inputs.get(name)
        if known is None:
            known = _Input(
                bits.new_zeros(num_rows, *bits.shape[1:]), torch.zeros(num_rows, dtype=torch.bool, device=bits.device)
            )
            self._inputs[name] = known
        is_new = ~known.is_seen[rows]
        num_before = int(known.is_seen.sum())
        known.bits[rows[is_new]] = bits[is_new]
        known.is_seen[rows] = True
        num_new = int(known.is_seen.sum()) - num_before
        differs = (known.bits[rows] != bits).flatten(1).sum(1)
        self._compared += (rows.numel() - num_new) * bits[0].numel()
        changed = int(differs.sum())
        if changed and not self._changed:
            row = int(rows[int(differs.argmax())])
            self._where = f"{where}: {int(differs.max())} values of row {row} of the input {name!r}"
        self._changed += changed

    @property
    def is_ended(self) -> bool:
        """Return whether nothing more has to be computed: a bit has changed, and the first is enough."""
        return self._ends_early and self._changed > 0

    def result(self, order: str, digested: dict[str, Tensor]) -> Invariance:
        """Return what was seen. `digested`: the rows of each input that every path of the order computes.

        Raises ValueError where such a row was not computed.
        """
        digests: list[tuple[str, str]] = []
        if self.is_ended:
            return Invariance(order, self._compared, self._changed, (), self._where)
        for name, rows in sorted(digested.items()):
            known = self._inputs.get(name)
            if known is None or not bool(known.is_seen[rows].all()):
                raise ValueError(f"rows of the input {name!r} were not computed, which a digest needs")
            content = known.bits[rows].cpu().numpy().tobytes()
            digests.append((name, hashlib.sha256(content).hexdigest()[:_DIGITS]))
        return Invariance(order, self._compared, self._changed, tuple(digests), self._where)
