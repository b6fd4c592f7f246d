"""Inputs of graphs that are written only where they change equal those that are written whole."""

import random
import sys
from array import array

import pytest
import torch
from torch import Tensor

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Phase
from server.engine.execution.graph_keys import GraphKey, GraphSizes, graph_keys, key_of
from server.engine.execution.step_buffer import StepTensors
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import PENDING, Batch, Sequence
from server.protocol.messages import SamplingParams, Submit
from support.engine.fake_runner import DeviceTwin, Landing
from support.engine.graph_session import Inputs

PAGE_SIZE = 4
NUM_PAGES = 40
MAX_LEN = 150  # two buckets of contexts
SIZES = GraphSizes((Bucket.LE_512,), (1, 2, 4, 8), (16, 32), (8,), (16, 32), num_prompts=3, row_tokens=(2, 4))


def new_inputs(keys: list[GraphKey]) -> Inputs:
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "max_context": MAX_LEN}
    return Inputs(keys, num_prompts=SIZES.num_prompts, **sizes)


def contents(tensors: StepTensors) -> list[list[int]]:
    """Everything that a graph reads: of page tables, the pages that contexts reach into."""
    found: list[Tensor | None] = [
        tensors.tokens["token_ids"],
        tensors.tokens["slots"],
        tensors.tokens["positions"],
        tensors.sampled,
    ]
    found += [tensors.is_pending]
    if tensors.chosen_at is not None and tensors.is_pending is not None:
        found.append(tensors.chosen_at[tensors.is_pending])
    read = [it.tolist() for it in found if it is not None]
    if tensors.is_pending is not None:  # the ids of other rows come from elsewhere
        num_rows = tensors.is_pending.shape[0]
        read[0][-num_rows:] = torch.where(tensors.is_pending, 0, tensors.tokens["token_ids"][-num_rows:]).tolist()
    for part in tensors.parts:
        lens, table = part.batch.context_lens, part.batch.page_table
        read.append(part.batch.cu_seqlens_q.tolist())
        if lens is not None and table is not None:
            read.append(lens.tolist())
            read += [table[row, : -(-int(n) // PAGE_SIZE)].tolist() for row, n in enumerate(lens)]
    return read


class Filling(DeviceTwin):
    """Fills the same inputs for each batch, as a device with graphs does, and holds them against new ones."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(page_size=PAGE_SIZE)
        self.inputs = inputs
        self.chosen_at: dict[Sequence, int] = {}
        self.keys: list[GraphKey] = []

    def launch(self, batch: Batch) -> Landing:
        key = key_of(batch, SIZES)
        if key is not None:
            self.keys.append(key)
            found = contents(self.inputs.load(batch, key, self.chosen_at))
            assert found == contents(new_inputs([key]).load(batch, key, self.chosen_at))
        chosen_at = {batch.sequences[row]: place for place, row in enumerate(batch.sampled_rows)}
        if chosen_at != self.chosen_at:  # the same object where it says the same, as the runner has it
            self.chosen_at = chosen_at
        return super().launch(batch)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return new_inputs(graph_keys(SIZES))


@pytest.mark.parametrize(("seed", "drafts"), [*((seed, False) for seed in range(6)), (6, True), (7, True), (8, True)])
def test_inputs_equal_new_ones_whatever_came_before(inputs: Inputs, seed: int, drafts: bool) -> None:
    rng = random.Random(seed)
    twin = Filling(inputs)
    pool = PagePool(rng.choice([20, NUM_PAGES]), PAGE_SIZE)
    limits = SchedulerLimits(MAX_LEN, 8, 32, max_drafted_tokens=3)
    scheduler = Scheduler(limits, pool, shares_pages=rng.random() < 0.5)

    def draft(seq: Sequence, most: int) -> list[int]:
        right = twin.answer(seq.tokens, rng.choice([0, 0, most]))
        return right[: rng.randint(0, most)] + [rng.randrange(twin.vocab_size) for _ in right]

    options = EngineOptions(twin.vocab_size, (), 0, runs_ahead=rng.random() < 0.7)
    engine = Engine(scheduler, twin, options, drafter=draft if drafts else None)
    alive: list[str] = []
    num_preemptions = 0
    for step in range(100):
        if rng.random() < 0.25:
            alive.append(f"r{step}")
            prompt = [rng.randrange(twin.vocab_size) for _ in range(rng.randint(1, 40))]
            stops = (rng.randrange(twin.vocab_size),)
            sampling = SamplingParams(max_tokens=rng.randint(1, 60), temperature=0.0, stop_token_ids=stops)
            engine.submit(Submit(alive[-1], prompt, sampling))
        if alive and rng.random() < 0.08:
            engine.cancel(rng.choice(alive))
        output = engine.step(may_run_ahead=rng.random() < 0.9)
        num_preemptions += 0 if output is None else output.record.num_preemptions
    assert len({key.decode for key in twin.keys}) > 3
    assert any(key.prompts is not None and key.prompts.phase is Phase.EXTEND for key in twin.keys)
    assert num_preemptions or pool.num_pages == NUM_PAGES
    phases = {key.decode.phase for key in twin.keys if key.decode is not None}
    assert phases == ({Phase.DECODE, Phase.VERIFY} if drafts else {Phase.DECODE})


def test_what_another_graph_writes_over_keeps_no_sequence_alive(inputs: Inputs) -> None:
    def batch(num_rows: int) -> Batch:
        sequences = tuple(Sequence("", [5], 1, SamplingParams(max_tokens=1), 0, 0.0) for _ in range(num_rows))
        lens = (1,) * num_rows
        tables = tuple(array("i", [row]) for row in range(num_rows))
        return Batch(sequences, lens, lens, tables, tuple(range(num_rows)), 0, 0)

    first, second = batch(1), batch(8)
    sequence = first.sequences[0]
    sequence.tokens[-1] = PENDING
    chosen_at = {sequence: 0}
    for it in (first, second):
        for _ in range(2):  # both of the host's buffers
            key = key_of(it, SIZES)
            assert key is not None
            inputs.load(it, key, chosen_at)
    assert sys.getrefcount(chosen_at) == 2  # the name's and the call's


def test_a_row_keeps_the_pages_of_drafted_tokens_that_did_not_hold(inputs: Inputs) -> None:
    """A graph of contexts up to 128 tokens has no column for the page of a 129th, which did not hold."""
    bound, num_pages = 128, 128 // PAGE_SIZE
    seq = Sequence("", [5] * bound, bound - 1, SamplingParams(max_tokens=9), 0, 0.0)
    table = array("i", range(num_pages + 1))
    batch = Batch((seq,), (2,), (bound,), (table,), (0,), 0, 0, verifies=True)
    key = key_of(batch, SIZES)
    assert key is not None
    assert [part.longest.hi for part in key.parts] == [bound]
    rows = inputs.load(batch, key).parts[0].batch.page_table
    assert rows is not None
    assert rows[0].tolist() == list(range(num_pages))
