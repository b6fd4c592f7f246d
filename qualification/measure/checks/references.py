"""References that the outputs of all paths of one shape are compared with, computed once.

The fp32 attention of every row of 8k queries over 128k keys takes an H200 longer than all that is measured of a path.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8_cache.pages import E4M3, dequantized
from kernels.reference.compare import Reference, coarse_reference_of, reference_of
from kernels.reference.convolution import ConvolutionReference, convolution_reference
from kernels.reference.experts import experts_reference
from kernels.reference.recurrence import recurrence_reference
from kernels.reference.recurrent_errors import RecurrenceReference
from kernels.reference.state_space import state_space_reference
from kernels.system.device import torch_dtype
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.recurrence_form import RecurrenceForm
from qualification.measure.inputs.attention_inputs import Case
from qualification.measure.inputs.convolution_inputs import ConvolutionCase
from qualification.measure.inputs.experts_inputs import ExpertsCase
from qualification.measure.inputs.recurrence_inputs import RecurrenceCase


@dataclass(frozen=True, slots=True)
class CaseReference:
    drawn: Reference  # of `case.rows`
    every: Reference  # of all rows, in fp32

    @property
    def num_bytes(self) -> int:
        return self.drawn.num_bytes + self.every.num_bytes


class References:
    """References by name and seed of the cases of one shape, whose inputs are the same each time they are made."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], CaseReference] = {}
        self._of_experts: dict[tuple[str, int], Reference] = {}
        self._of_recurrences: dict[tuple[str, int], RecurrenceReference] = {}
        self._of_convolutions: dict[tuple[str, int], ConvolutionReference] = {}

    def of(self, case: Case) -> CaseReference:
        key = (case.name, case.seed)
        if key not in self._known:
            read = case.near or case
            inputs = read.q, _as_read(read.k), _as_read(read.v), read.batch, read.flags
            self._known[key] = CaseReference(reference_of(*inputs, rows=case.rows), coarse_reference_of(*inputs))
        return self._known[key]

    def of_experts(self, case: ExpertsCase) -> Reference:
        key = (case.name, case.seed)
        if key not in self._of_experts:
            inputs = case.hidden, case.experts, case.weights, case.expert_weights, case.activation
            self._of_experts[key] = experts_reference(*inputs)
        return self._of_experts[key]

    def of_recurrence(self, case: RecurrenceCase) -> RecurrenceReference:
        key = (case.name, case.seed)
        if key not in self._of_recurrences:
            is_space = case.shape.form in (RecurrenceForm.STATE_SPACE, RecurrenceForm.FIXED_DECAY)
            of_form = state_space_reference if is_space else recurrence_reference
            qkv, a, b = case.tokens
            inputs = qkv, a, b, case.weights, case.shape.sizes
            self._of_recurrences[key] = of_form(*inputs, case.borders, torch_dtype(case.shape.state_dtype))
        return self._of_recurrences[key]

    def of_convolution(self, case: ConvolutionCase) -> ConvolutionReference:
        key = (case.name, case.seed)
        if key not in self._of_convolutions:
            [projected] = case.tokens
            self._of_convolutions[key] = convolution_reference(projected, case.weights)
        return self._of_convolutions[key]

    @property
    def num_bytes(self) -> int:
        of_experts = sum(it.num_bytes for it in self._of_experts.values())
        of_recurrences = sum(it.num_bytes for it in self._of_recurrences.values())
        of_convolutions = sum(it.num_bytes for it in self._of_convolutions.values())
        return of_experts + of_recurrences + of_convolutions + sum(it.num_bytes for it in self._known.values())


def _as_read(k: Tensor) -> Tensor:
    """Keys or values [..., kv_heads, head_dim] as a right kernel reads them: with scales multiplied out, in fp64."""
    return dequantized(k, torch.float64) if k.dtype is E4M3 else k


class Shelf:
    """References of shapes that come again: the first tier of every shape is measured before any fallback."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._kept: dict[AnyShape, References] = {}

    def put(self, shape: AnyShape, references: References) -> None:
        """Keep them, where there is room."""
        if references.num_bytes <= self._left_bytes:
            self._left_bytes -= references.num_bytes
            self._kept[shape] = references

    def take(self, shape: AnyShape) -> References:
        """Remove and return the shape's stored references; new ones where there are none."""
        found = self._kept.pop(shape, None)
        if found is None:
            return References()
        self._left_bytes += found.num_bytes
        return found
