"""A draft head for the proofs: steps with it behind them, held to the plain forward pass; its passes, to attest."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.vocabulary.shape import Phase
from qualification.model.forward.head import HeadReference
from server.engine.execution.head_steps import HeadSteps
from server.engine.execution.runner import ModelRunner
from server.engine.operators.decisions import NoPathError
from server.engine.operators.observation import Observation
from server.engine.scheduling.head_drafter import DraftedRow, HeadRow
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import Batch


class FollowedSteps:
    """Runs steps of the served model, and its head behind each; what the head hands out is what is observed."""

    def __init__(self, runner: ModelRunner, reference: HeadReference) -> None:
        """`reference` gets what the head computes with."""
        self._runner = runner
        self._steps = HeadSteps(runner)
        self._reference = reference

    def observe(self, batch: Batch) -> tuple[Tensor, Observation]:
        """Run a batch; return what the head makes of its tokens [T, hidden] and what its layer handed out."""
        hidden, _ = self._runner.observe(batch)
        rows = []
        for row, seq in enumerate(batch.sequences):
            first = batch.context_lens[row] - batch.query_lens[row]
            next_ids = [*seq.tokens, seq.tokens[0]][first + 1 : batch.context_lens[row] + 1]  # any behind the newest
            rows.append(HeadRow(seq, row, 0, first, next_ids, batch.page_tables[row], num_drafting=0))
        out, observation = self._steps.observe(batch, rows)
        ids = torch.tensor([it for row in rows for it in row.next_ids], device=hidden.device)
        before = self._reference.given
        self._reference.given = ids, hidden.clone()
        if before is not None:
            self._reference.given = torch.cat((before[0], ids)), torch.cat((before[1], hidden))
        return out, observation


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """A pass of the head that is launched: nothing of it is read."""

    quarantined: list[tuple[str, str]]

    def choose(self) -> None: ...

    def result(self) -> StepResult:
        return StepResult([], quarantined=self.quarantined)


class HeadPasses:
    """Computes the rows of batches by the draft head alone, in place of a runner: an attestation looks at its kernels.

    What it reads is left of whatever the model, or the head, has computed last. What was drafted stays as it was: an
    attestation comes between the step that has drafted and the one that verifies.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps = HeadSteps(runner)  # without graphs
        self._drafts = runner.worker.new_drafts()  # kept: a graph that is timed writes to it

    def launch(self, batch: Batch) -> ComputedPass:
        """Compute a batch of one phase, and draft a token behind each row. Raises NoPathError."""
        with self._runner.worker.drafting_in(self._drafts):
            return self._launch(batch)

    def _launch(self, batch: Batch) -> ComputedPass:
        rows = zip(batch.sequences, batch.query_lens, batch.context_lens, batch.page_tables, strict=True)
        if batch.rows_of(Phase.DECODE):
            drafted = [DraftedRow(seq, place, end - 1, table) for place, (seq, _, end, table) in enumerate(rows)]
            is_computed = self._steps.go_on(drafted)
        else:
            found = [
                HeadRow(seq, row, 0, end - count, [0] * count, table, num_drafting=1)
                for row, (seq, count, end, table) in enumerate(rows)
            ]
            is_computed = self._steps.follow(batch, found)
        self._runner.worker.synchronize()  # before the next pass is written
        if not is_computed:
            raise NoPathError(None, "the draft head cannot be computed: the log says why")
        return ComputedPass(self._runner.dispatcher.take_quarantined())

    def graph(self, capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph | None:
        """Return the latest pass as a CUDA graph, its inputs in place; None where it cannot be captured."""
        buffer, is_first = self._steps.latest
        with self._runner.worker.drafting_in(self._drafts):
            return self._runner.worker.record_head(buffer, capture, is_first=is_first)
