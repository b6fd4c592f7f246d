"""Drawn answers of which tokens are drafted by another distribution, with the same noise, have the model's own."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from itertools import product

import torch
from torch import Tensor

from kernels.sampling.sampling import sample, sampling_tensors
from server.engine.execution.sampling import row_sampling
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.head_drafter import DraftedRow, HeadDrafter, HeadRow
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import Fork, SamplingParams, Submit
from support.engine.fake_runner import Done

VOCAB, LENGTH, NUM_DRAWS, AT_ONCE = 3, 3, 4_000, 500
MODEL = torch.tensor([[0.2, 1.0, -0.5], [1.1, -0.2, 0.4], [-0.7, 0.3, 0.9]])  # logits behind each token
HEAD = torch.tensor([[0.9, 0.1, -0.5], [0.8, 0.5, 0.1], [-0.1, 0.4, 0.2]])


def drawn(logits: Tensor, rows: SequenceOf[tuple[Sequence, int]], before: list[int]) -> list[int]:
    """Return a token of each (sequence, position), which stands behind `before`."""
    tensors = sampling_tensors([row_sampling(*it) for it in rows], VOCAB, torch.device("cpu"))
    found: list[int] = sample(logits[before], tensors).token_ids.tolist()
    return found


class Runner:
    """A model whose next token depends on the one before alone."""

    def launch(self, batch: Batch) -> Done:
        draws = batch.draws
        tokens = iter(drawn(MODEL, draws, [seq.tokens[position - 1] for seq, position in draws]))
        counts = [len(batch.drawn_positions(row)) for row in batch.drawn_rows]
        return Done(StepResult([[next(tokens) for _ in range(count)] for count in counts]))


class Head:
    """A head of another distribution."""

    def __init__(self) -> None:
        self.drafted: list[list[int]] = []

    def follow(self, _: Batch, rows: SequenceOf[HeadRow]) -> bool:
        asked = [it for it in rows if it.is_drafted_for]
        places = [(it.sequence, it.first + len(it.next_ids) + 1) for it in asked]
        self.drafted = [drawn(HEAD, places, [it.next_ids[-1] for it in asked])]
        return True

    def go_on(self, rows: SequenceOf[DraftedRow]) -> bool:
        places = [(it.sequence, it.position + 2) for it in rows]
        self.drafted.append(drawn(HEAD, places, [self.drafted[-1][it.place] for it in rows]))
        return True

    def take(self) -> list[list[int]]:
        return self.drafted


def test_drafted_answers_have_the_distribution_of_the_model() -> None:
    """4,000 answers, by a chi-square at 1e-6; and the head is believed as often as both draw alike."""
    pool = PagePool(4096, 4)
    limits = SchedulerLimits(64, AT_ONCE, 8 * AT_ONCE, max_drafted_tokens=2)
    scheduler = Scheduler(limits, pool, shares_pages=True, looks_ahead=True)
    drafter = HeadDrafter(Head(), pool, most_rows=AT_ONCE, row_tokens=3)
    engine = Engine(scheduler, Runner(), EngineOptions(VOCAB, (), 0), drafter=drafter)
    answers: dict[str, list[int]] = {}
    drafted = accepted = 0
    for first in range(0, NUM_DRAWS, AT_ONCE):
        sampling = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=first)
        forks = [Fork(str(seed), seed) for seed in range(first + 1, first + AT_ONCE)]
        engine.submit(Submit(str(first), [1, 2, 0, 1, 0], sampling, forks=forks))
        while engine.has_work:
            output = engine.step()
            assert output is not None
            for delta in output.deltas:
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
            if (counts := output.record.drafts) is not None:
                drafted, accepted = drafted + sum(counts.drafted), accepted + sum(counts.accepted)
    found = Counter(map(tuple, answers.values()))
    assert sum(found.values()) == NUM_DRAWS
    assert 0.55 < accepted / drafted < 0.95
    shares = MODEL.double().softmax(dim=1)
    statistic = 0.0
    for answer in product(range(VOCAB), repeat=LENGTH):
        path = zip((0, *answer), answer, strict=False)
        expected = NUM_DRAWS * torch.stack([shares[before, token] for before, token in path]).prod().item()
        statistic += (found[answer] - expected) ** 2 / expected
    halves = torch.tensor([(VOCAB**LENGTH - 1) / 2, statistic / 2], dtype=torch.float64)
    assert torch.special.gammaincc(*halves).item() > 1e-6
