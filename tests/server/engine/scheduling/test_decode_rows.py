"""Rows that are kept from step to step equal those made from scratch."""

import random
from array import array

import pytest

from server.engine.scheduling.decode_rows import DecodeRows
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams


def sequence(num_tokens: int) -> Sequence:
    return Sequence("", [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1), seed=0, submitted_at=0.0)


def by_sequence(batch: Batch) -> "dict[Sequence, tuple[int, array[int]]]":
    rows = zip(batch.context_lens, batch.page_tables, strict=True)
    return dict(zip(batch.sequences, rows, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_those_made_from_scratch(seed: int) -> None:
    rng = random.Random(seed)
    subject = DecodeRows(max_rows=9)
    tables: dict[Sequence, array[int]] = {}
    borders: dict[Sequence, int] = {}
    for _ in range(300):
        if len(tables) < 9 and rng.random() < 0.3:
            seq = sequence(rng.randrange(1, 40))
            tables[seq], borders[seq] = array("i", [rng.randrange(99)]), rng.randrange(1, 60)
            subject.add(seq, tables[seq], borders[seq])
        if tables and rng.random() < 0.2:
            gone = rng.choice(list(tables))
            subject.discard(gone)
            subject.discard(gone)  # it is not here any more
            del tables[gone], borders[gone]
        for seq in subject.past_border():
            borders[seq] += rng.randrange(8)
            subject.set_border(seq, borders[seq])
        assert {*subject.past_border()} == {seq for seq in tables if len(seq.tokens) > borders[seq]}
        batch = subject.batch(num_preempted=rng.randrange(3))
        assert len(subject) == batch.num_rows == len(tables)
        assert by_sequence(batch) == {seq: (len(seq.tokens), table) for seq, table in tables.items()}
        assert batch.query_lens == (1,) * len(tables)
        assert batch.sampled_rows == tuple(range(len(tables)))
        if rng.random() < 0.8:  # else it could not be launched
            subject.advance()
            for seq in tables:
                seq.tokens.append(0)
