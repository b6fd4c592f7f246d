"""Attention by the plan's decisions: found by the lengths of a batch."""

from collections.abc import Iterable, Mapping
from typing import Unpack

from kernels.calls.batch import AttentionBatch
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import KernelPath, RunAttention
from kernels.vocabulary.shape import AttentionShape, Phase
from qualification.decision.decision import Decision
from server.engine.operators.decisions import NoPathError, why_no_path
from server.engine.operators.dispatch_key import CAUSAL, LayerKind, LengthKey, bucket_index, keys_of_shape
from server.engine.operators.launch_errors import launch_failure
from server.engine.operators.table import OperatorChoice, OperatorTable, TableOptions

Choice = OperatorChoice[AttentionShape, RunAttention]


class AttentionTable(OperatorTable[AttentionShape, RunAttention]):
    """The decisions for a model's attention. A launch that fails on one of several ranks is its caller's to handle."""

    def __init__(
        self,
        decisions: Mapping[AttentionShape, Decision[AttentionShape]],
        paths: Iterable[KernelPath],
        **options: Unpack[TableOptions[AttentionShape]],
    ) -> None:
        super().__init__(Operator.ATTENTION, decisions, paths, why_not_launched=launch_failure, **options)
        self._by_lengths: dict[Phase, dict[LengthKey, Choice]] = {phase: {} for phase in Phase}
        self._has_fp8_cache = any(shape.kv_dtype is FP8 for shape in decisions)
        for choice in self.choices:
            of_phase = self._by_lengths[choice.decision.shape.phase]
            of_phase.update(dict.fromkeys(self._keys_of(choice.decision.shape), choice))
        self._decode = self._by_lengths[Phase.DECODE]

    def choice(self, phase: Phase, batch: AttentionBatch, kind: LayerKind, mask: int = CAUSAL) -> Choice:
        """One dictionary hit. Raises NoPathError for a shape without a path, which no start-up lets through.

        mask  as `dispatch_key` numbers it
        """
        if phase is Phase.DECODE:
            key = (kind, 0, bucket_index(batch.max_context), CAUSAL)
            found = self._decode.get(key)
        else:
            key = (kind, bucket_index(batch.max_seqlen_q), bucket_index(batch.max_context), mask)
            found = self._by_lengths[phase].get(key)
        if found is None:
            lengths = f"{batch.max_seqlen_q} of {batch.max_context} tokens"
            window, heads = kind
            of_phase = ((shape, it) for shape, it in self.plan.items() if shape.phase is phase)
            lost = (why_no_path(it) for shape, it in of_phase if key in self._keys_of(shape))
            message = f"no path for {phase.value}, d{heads.dim}, window {window}, {lengths}"
            raise NoPathError(phase, message + next(lost, ""))
        return found

    def _decided(self, decision: Decision[AttentionShape]) -> None:
        super()._decided(decision)
        shape = decision.shape
        choice = self._choices[shape]
        of_phase = self._by_lengths[shape.phase]
        for key in self._keys_of(shape):
            if choice is None:
                of_phase.pop(key, None)
            else:
                of_phase[key] = choice

    def _keys_of(self, shape: AttentionShape) -> tuple[LengthKey, ...]:
        return keys_of_shape(shape, has_fp8_cache=self._has_fp8_cache)
