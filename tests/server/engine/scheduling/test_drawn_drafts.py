"""Drawn answers of which tokens are drafted by another distribution, with the same noise, have the model's own."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.sampling.sampling import sample, sampling_tensors
from server.engine.execution.sampling import row_sampling
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.head_drafter import FEW_ROWS, DraftedRow, HeadDrafter, HeadRow
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import PENDING, Batch, Sequence
from server.protocol.messages import Fork, SamplingParams, Submit
from support.engine.fake_runner import Done

VOCAB, LENGTH = 3, 3
MODEL = torch.tensor([[0.2, 1.0, -0.5], [1.1, -0.2, 0.4], [-0.7, 0.3, 0.9]])  # logits behind each token
HEAD = torch.tensor([[0.9, 0.1, -0.5], [0.8, 0.5, 0.1], [-0.1, 0.4, 0.2]])


def drawn(logits: Tensor, rows: SequenceOf[tuple[Sequence, int]], before: list[int]) -> list[int]:
    """Return a token of each (sequence, position), which stands behind `before`."""
    tensors = sampling_tensors([row_sampling(*it) for it in rows], VOCAB, torch.device("cpu"))
    found: list[int] = sample(logits[before], tensors).token_ids.tolist()
    return found


class Device:
    """A model whose next token depends on the one before alone, and a head of another distribution."""

    def __init__(self) -> None:
        self.chosen: list[list[int]] = []  # by the model, of each row
        self.drafted: list[int] = []
        self.num_of_pass = 0

    def launch(self, batch: Batch) -> Done:
        draws, drafted = batch.draws, [self.drafted[place] for place in batch.drafted_at]
        known = iter(drafted)
        before = [seq.tokens[position - 1] for seq, position in draws]
        tokens = iter(drawn(MODEL, draws, [next(known) if token == PENDING else token for token in before]))
        counts = [len(batch.drawn_positions(row)) for row in batch.drawn_rows]
        self.chosen = [[next(tokens) for _ in range(count)] for count in counts]
        return Done(StepResult([[*own] for own in self.chosen], drafted=drafted))

    def follow(self, _: Batch, rows: SequenceOf[HeadRow]) -> bool:
        places, before = [], []
        for it in rows:
            next_ids = self.chosen[it.row] if it.next_ids[-1] == PENDING else it.next_ids
            for index in range(len(next_ids) - it.num_drafting, len(next_ids)):
                places.append((it.sequence, it.first + index + 2))
                before.append(next_ids[index])
        self.drafted = drawn(HEAD, places, before) if places else []
        self.num_of_pass = len(places)
        return True

    def go_on(self, rows: SequenceOf[DraftedRow]) -> bool:
        places, latest = [(it.sequence, it.position + 2) for it in rows], self.drafted[-self.num_of_pass :]
        self.drafted += drawn(HEAD, places, [latest[it.place] for it in rows])
        self.num_of_pass = len(rows)
        return True

    def take(self, places: SequenceOf[int]) -> list[int]:
        return [self.drafted[place] for place in places]


@pytest.mark.parametrize(("num_answers", "num_rows", "runs_ahead"), [(4_000, 500, False), (800, FEW_ROWS, True)])
def test_drafted_answers_have_the_distribution_of_the_model(num_answers: int, num_rows: int, runs_ahead: bool) -> None:
    """Compare by a chi-square at 1e-6; the head is believed as often as both draw alike."""
    pool = PagePool(4096, 4)
    limits = SchedulerLimits(64, num_rows, 8 * num_rows, max_drafted_tokens=2)
    scheduler = Scheduler(limits, pool, shares_pages=True, looks_ahead=True)
    device = Device()
    drafter = HeadDrafter(device, pool, most_rows=num_rows, row_tokens=3)
    engine = Engine(scheduler, device, EngineOptions(VOCAB, (), 0, runs_ahead), drafter=drafter)
    answers: dict[str, list[int]] = {}
    drafted = accepted = 0
    for first in range(0, num_answers, num_rows):
        sampling = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=first)
        forks = [Fork(str(seed), seed) for seed in range(first + 1, first + num_rows)]
        engine.submit(Submit(str(first), [1, 2, 0, 1, 0], sampling, forks=forks))
        while engine.has_work:
            output = engine.step()
            assert output is not None
            for delta in output.deltas:
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
            if (counts := output.record.drafts) is not None:
                drafted, accepted = drafted + sum(counts.drafted), accepted + sum(counts.accepted)
    found = Counter(map(tuple, answers.values()))
    assert sum(found.values()) == num_answers
    assert 0.55 < accepted / drafted < 0.95
    shares = MODEL.double().softmax(dim=1)
    statistic = 0.0
    for answer in product(range(VOCAB), repeat=LENGTH):
        path = zip((0, *answer), answer, strict=False)
        expected = num_answers * torch.stack([shares[before, token] for before, token in path]).prod().item()
        statistic += (found[answer] - expected) ** 2 / expected
    halves = torch.tensor([(VOCAB**LENGTH - 1) / 2, statistic / 2], dtype=torch.float64)
    assert torch.special.gammaincc(*halves).item() > 1e-6
