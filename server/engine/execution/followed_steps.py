"""Steps with their draft head behind them, for the check that holds it to the plain forward pass of its one layer."""

import torch
from torch import Tensor

from qualification.model.forward.head import HeadReference
from server.engine.execution.head_steps import HeadSteps
from server.engine.execution.runner import ModelRunner
from server.engine.operators.observation import Observation
from server.engine.scheduling.head_drafter import HeadRow
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
            rows.append(HeadRow(seq, row, 0, first, next_ids, batch.page_tables[row], is_drafted_for=False))
        out, observation = self._steps.observe(batch, rows)
        ids = torch.tensor([it for row in rows for it in row.next_ids], device=hidden.device)
        before = self._reference.given
        self._reference.given = ids, hidden.clone()
        if before is not None:
            self._reference.given = torch.cat((before[0], ids)), torch.cat((before[1], hidden))
        return out, observation
