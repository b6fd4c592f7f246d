"""Prompts with tokens that have embeddings of their own. Random ones beside all else: test_engine_walks.py."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from server.engine.scheduling.page_keys import PageKeys
from server.engine.scheduling.page_seals import PageSeals
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import PENDING, Sequence
from server.model.decoder import Decoder
from server.protocol.messages import EmbeddedSpan, SamplingParams
from support.engine.closure_graphs import capture
from support.engine.embedded_prompts import PLACEHOLDER, with_spans
from support.engine.graph_session import Session
from support.engine.late_dispatch import MAX_LEN, PAGE_SIZE
from support.engine.served_decoder import ServedDecoder
from support.models.image_positions import NUM_TOKENS, POSITIONS, save_with_positions, three_part
from support.models.tiny_families import TINY, prompt
from support.models.tiny_llama import TinyLlama

NUM_PAGES = 64
Given = tuple[list[int], list[EmbeddedSpan]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen2.5-vl")
    return save_with_positions(folder), folder


def session_of(decoder: Decoder, *, max_step: int = 32, num_embeddings: int = 80, has_graphs: bool = False) -> Session:
    given = {"max_seqs": min(6, max_step), "max_step": max_step, "num_embeddings": num_embeddings}
    return ServedDecoder(decoder, capture=capture if has_graphs else None, **given)  # type: ignore[arg-type]


class WithoutSpans:
    """A tap that names the pages of each sequence by its token ids alone."""

    def begin(self, seq: Sequence) -> None:
        seq.page_keys = PageKeys(PAGE_SIZE, seq.cache_salt)

    def end(self, seq: Sequence, *, is_sound: bool) -> None: ...


def ask(session: Session, given: Given, **sampling: object) -> tuple[list[int], int]:
    """Return the answer, and how many tokens of the prompt were found in pages."""
    session.outputs.clear()
    session.submit("r", given[0], embedded=given[1], **sampling)
    session.drain()
    return session.tokens("r"), session.total("num_prefix_hit_tokens")


def of_all(length: int) -> list[tuple[int, int]]:
    """Return places of a prompt of that length: its first tokens, some within, its last one."""
    ends = sorted({0, length // 5, length // 3, 2 * length // 3, length - 1, length})
    return list(pairwise(ends))[::2]


@pytest.mark.parametrize("max_step", [1, 2, 3, 7, 32])
def test_answers_are_those_of_the_tokens_wherever_a_chunk_ends(
    decoder: Decoder, tiny_llama: TinyLlama, max_step: int
) -> None:
    session = session_of(decoder, max_step=max_step)
    for index, given in enumerate(tiny_llama.prompts):
        token_ids, spans = with_spans(decoder, given, *of_all(len(given)))
        session.submit(f"r{index}", token_ids, embedded=spans)
    assert session.drain().all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy


def test_pages_are_found_by_the_same_content_only(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    first = tiny_llama.prompts[5]  # of 71 tokens
    other = [*first[:20], *reversed(first[20:40]), *first[40:]]
    text, plain = session_of(decoder), session_of(decoder)
    due = {name: ask(plain, (prompt, []), max_tokens=6)[0] for name, prompt in (("first", first), ("other", other))}
    given = {name: with_spans(decoder, prompt, (20, 40)) for name, prompt in (("first", first), ("other", other))}
    assert given["first"][0] == given["other"][0]
    found = [ask(text, given[name], max_tokens=6) for name in ("first", "other", "first", "other")]
    assert found == [(due["first"], 0), (due["other"], 16), (due["first"], 64), (due["other"], 64)]
    assert ask(text, (given["first"][0], []), max_tokens=6)[1] == 16  # the placeholders themselves
    assert ask(text, (first, []), max_tokens=6) == (due["first"], 16)


def test_pages_of_another_image_are_dropped(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    first = tiny_llama.prompts[5]
    other = [*first[:20], *reversed(first[20:40]), *first[40:]]
    right, wrong = session_of(decoder), session_of(decoder)
    wrong.engine.answers = WithoutSpans()
    for number, tokens in enumerate((first, other)):
        given = with_spans(decoder, tokens, (20, 40))
        assert ask(wrong, given, max_tokens=6)[0] == ask(right, given, max_tokens=6)[0]
        assert sum(output.record.num_page_mismatches for output in wrong.outputs) == number


def test_a_page_is_named_by_where_a_span_is_and_what_it_holds() -> None:
    def names(*spans: tuple[int, int, bytes]) -> list[bytes]:
        embedded = tuple(EmbeddedSpan(start, size, digest, b"") for start, size, digest in spans)
        keys = PageKeys(4, embedded=embedded)
        keys.first(1, [PLACEHOLDER] * 12)
        return keys.copy().first(3, [PLACEHOLDER] * 12)

    prompts = [(), ((2, 4, b"a"),), ((1, 4, b"a"),), ((2, 4, b"b"),), ((2, 3, b"a"),), ((2, 4, b"a"), (7, 1, b"c"))]
    for page, num_different in enumerate((5, 6, 6)):  # the first page of the last prompt is that of the second
        assert len({names(*spans)[page] for spans in prompts}) == num_different
    behind = [names((5, 2, b"a")), names((5, 2, b"b"))]
    assert [a == b for a, b in zip(*behind, strict=True)] == [True, False, False]


def held(rows: int, num_prompts: int, digest: Callable[[int], bytes]) -> Scheduler:
    """Return a scheduler with a buffer of so many rows, and prompts of 8 tokens, 6 of which are a span."""
    limits = SchedulerLimits(MAX_LEN, 8, 64, max_embedded_tokens=rows)
    subject = Scheduler(limits, PagePool(NUM_PAGES, PAGE_SIZE))
    for index in range(num_prompts):
        span = EmbeddedSpan(1, 6, digest(index), b"")
        given = {"sampling": SamplingParams(max_tokens=4), "seed": 0, "submitted_at": 0.0, "embedded": (span,)}
        subject.add(Sequence(str(index), [0] * 8, 8, **given))  # type: ignore[arg-type]
    return subject


def names_of(subject: Scheduler) -> list[str]:
    """Plan a step and launch it; return the requests whose prompts it computes."""
    batch = subject.plan(0.0)
    assert batch is not None
    subject.advance(batch)
    for seq in batch.drawn_sequences:
        seq.tokens.append(PENDING)
    subject.check_integrity()
    return [seq.request_id for seq, length in zip(batch.sequences, batch.query_lens, strict=True) if length > 1]


def test_a_prompt_waits_for_rows_until_those_before_it_are_computed() -> None:
    subject = held(13, 5, lambda index: bytes([65 + index]))
    assert [names_of(subject) for _ in range(3)] == [["0", "1"], ["2", "3"], ["4"]]
    subject = held(13, 5, lambda index: b"same" if index < 4 else b"other")
    assert names_of(subject) == ["0", "1", "2", "3", "4"]


def test_rows_are_written_once_and_again_behind_a_failed_launch() -> None:
    subject = held(13, 3, lambda index: b"same" if index < 2 else b"other")
    batches = []
    for _ in range(2):
        batch = subject.plan(0.0)
        assert batch is not None
        batches.append(batch)
        subject.abandon(batch)
    assert [[it.span.digest for it in batch.embeddings] for batch in batches] == [[b"same", b"other"]] * 2
    batch = subject.plan(0.0)
    assert batch is not None
    subject.advance(batch)
    for seq in list(batch.sequences):
        subject.finish(seq)
    subject.check_integrity()


def test_a_step_computes_whole_spans_wherever_it_ends() -> None:
    num_hits = 0
    for seed in range(40):
        draw = Random(seed)
        longest, num_seqs, page_size = draw.randint(1, 9), draw.randint(1, 5), draw.choice([1, 4, 8])
        interleaved = longest + draw.randint(0, 6)
        limits = SchedulerLimits(
            MAX_LEN,
            num_seqs,
            max(interleaved, longest + num_seqs),
            interleaved,
            max_attended_keys=draw.randint(1, 99),
            max_embedded_tokens=27,
            max_written_tokens=draw.choice([None, draw.randint(1, 12)]),
        )
        pool = PagePool(40, page_size)
        subject = Scheduler(limits, pool, shares_pages=True, seals=PageSeals(pool))
        for index in range(12):
            ids, spans = [1] * draw.randint(0, 9), []
            for _ in range(draw.randint(0, 3)):
                spans.append((len(ids), len(ids) + draw.randint(1, longest)))
                ids += [PLACEHOLDER] * (spans[-1][1] - len(ids)) + [2] * draw.randint(0, 4)
            ids += [1]
            embedded = tuple(EmbeddedSpan(start, stop - start, b"same", b"") for start, stop in spans)
            given = {"embedded": embedded, "whole_spans": tuple(spans)}
            sampling = SamplingParams(max_tokens=draw.randint(1, 9))
            subject.add(Sequence(str(index), ids, len(ids), sampling, 0, 0.0, **given))  # type: ignore[arg-type]
        while (batch := subject.plan(0.0)) is not None:
            for seq, length, end in zip(batch.sequences, batch.query_lens, batch.context_lens, strict=True):
                cut = {place for start, stop in seq.whole_spans for place in range(start + 1, stop)}
                assert not cut & {end - length, end}
            num_hits += batch.num_prefix_hit_tokens
            subject.advance(batch)
            for seq in batch.drawn_sequences:
                seq.tokens.append(7)
            subject.settle(batch)
            for seq in batch.drawn_sequences:
                if seq.finish_reason(len(seq.tokens)) is not None:
                    subject.finish(seq)
            subject.check_integrity()
        assert subject.is_idle
    assert num_hits


ROWS = bytes(4 * 64 * 2)
SPAN = EmbeddedSpan(1, 2, b"image", ROWS)
OFFSETS = np.array([[0, 0], [0, 0], [0, 1]], "<i4").tobytes()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([{"start": 3}], "within the prompt of 4"),
        ([{"start": -1}], "within the prompt of 4"),
        ([{"num_tokens": 0, "rows": b""}], "within the prompt of 4"),
        ([{}, {"start": 2, "digest": b"other"}], "in order, apart"),
        ([{"rows": ROWS[:-1]}], "511 bytes for 2 tokens of 64 numbers"),
        ([{"digest": b""}], "a digest"),
        ([{"offsets": OFFSETS}], "positions have one part"),
        ([{"num_positions": 1}], "positions have one part"),
        ([{"start": 0, "num_tokens": 4, "rows": 2 * ROWS}], "4 tokens of the prompt"),
    ],
)
def test_spans_that_do_not_fit_are_refused(decoder: Decoder, changes: list[dict[str, object]], why: str) -> None:
    session = session_of(decoder, num_embeddings=3)
    spans = [msgspec.structs.replace(SPAN, **it) for it in changes]
    session.submit("r", [5, PLACEHOLDER, PLACEHOLDER, 5], embedded=spans)
    (delta,) = [it for output in session.drain().outputs for it in output.deltas]
    assert (delta.error_code, why in (delta.error_message or "")) == ("invalid_value", True)


@torch.no_grad()
@pytest.mark.parametrize(("max_step", "has_graphs"), [(2, False), (32, False), (32, True)])
def test_an_image_is_answered_as_by_transformers(
    reference: tuple[PreTrainedModel, Path], max_step: int, has_graphs: bool
) -> None:
    """Positions of three parts: those of an image, and of what is generated behind it."""
    model, folder = reference
    token_ids, num_new = prompt(NUM_TOKENS), 8
    image = torch.randn(6, TINY["hidden_size"], generator=torch.Generator().manual_seed(1))
    hidden, positions = model.get_input_embeddings()(token_ids), POSITIONS
    hidden[3:9] = image
    due: list[int] = []
    for _ in range(num_new):
        due.append(int(model(inputs_embeds=hidden[None], position_ids=positions[:, None]).logits[0, -1].argmax()))
        hidden = torch.cat((hidden, model.get_input_embeddings()(torch.tensor(due[-1:]))))
        positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
    offsets = (POSITIONS[:, 3:9] - 3).int().numpy().tobytes()
    span = EmbeddedSpan(3, 6, b"image", image.numpy().tobytes(), offsets, num_positions=3)
    session = session_of(three_part(folder), max_step=max_step, has_graphs=has_graphs)
    session.submit("text", token_ids[:6].tolist(), max_tokens=num_new)
    found, _ = ask(session, (token_ids.tolist(), [span]), max_tokens=num_new)
    assert found == due
    assert ask(session, (token_ids.tolist(), [span]), max_tokens=num_new) == (due, 8)


def test_offsets_beyond_a_span_are_refused(reference: tuple[PreTrainedModel, Path]) -> None:
    session = session_of(three_part(reference[1]))
    wrong = [
        msgspec.structs.replace(SPAN, rows=bytes(4 * 32 * 2), offsets=offsets.tobytes(), num_positions=num_positions)
        for offsets, num_positions in (
            (np.array([[0, 0], [0, 0], [0, 2]], "<i4"), 2),
            (np.array([[0, 0], [0, 0], [0, -2]], "<i4"), 2),
            (np.array([[0, 0], [0, 0], [0, 1]], "<i4"), 3),
            (np.array([[0, 0], [0, 0]], "<i4"), 2),
        )
    ]
    for span in wrong:
        session.submit("r", [5, PLACEHOLDER, PLACEHOLDER, 5], embedded=[span])
    assert [it.error_code for output in session.drain().outputs for it in output.deltas] == ["invalid_value"] * 4
