"""Batches that no client sent: one for each planned shape before ready, those that are attested, and the largest one to
measure memory with.
"""

import time
from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import pairwise

import torch

from kernels.hopper.decode.variants import LARGE_SEQS, LARGE_TOKENS
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from qualification.decision.decision import Decision
from server.engine.operators.step_attention import Beat
from server.engine.scheduling.runner_api import Runner
from server.engine.scheduling.sequence import Batch, Sequence, phase_of
from server.engine.startup.limits import EngineLimits
from server.protocol.messages import SamplingParams

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# Every part of the sampler.
_FULL_SAMPLER = SamplingParams(max_tokens=1, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)
_TIMED_TOKENS = 256  # of the prompt that is timed: an eighth of the longest step by default
_LEAST_QUERY = 17  # tokens of a probe's query, where the bucket allows it: more than one, and no whole tile
_LEAST_CONTEXT = 33  # tokens of context before it


def synthetic_batch(
    rows: list[tuple[int, int]],
    page_size: int,
    sampling: SamplingParams = _GREEDY,
    *,
    page: int = 0,
    verifies: bool = False,
    mask: Mask = Mask.CAUSAL,
) -> Batch:
    """Rows of (query_len, context_len), all of one phase, over one page only, which no sequence owns.

    verifies  whether rows of several tokens verify drafted ones, and are no prompts
    mask      SPANS: the tokens of a row see each other both ways, as an image's
    """
    phases = {Phase.VERIFY if verifies else phase_of(query_len, context_len) for query_len, context_len in rows}
    assert len(phases) == 1
    phase = phases.pop()
    return Batch(
        sequences=tuple(
            Sequence(
                "",
                [0] * context_len,
                context_len,
                sampling,
                seed=0,
                submitted_at=0.0,
                whole_spans=((context_len - query_len, context_len),) if mask is Mask.SPANS else (),
            )
            for query_len, context_len in rows
        ),
        query_lens=tuple(query_len for query_len, _ in rows),
        context_lens=tuple(context_len for _, context_len in rows),
        page_tables=tuple(array("i", [page]) * -(-context_len // page_size) for _, context_len in rows),
        sampled_rows=tuple(range(len(rows))),
        num_prefill=len(rows) if phase is Phase.PREFILL else 0,
        num_extend=len(rows) if phase is Phase.EXTEND else 0,
        verifies=verifies,
    )


def warm_up(
    runner: Runner,
    decisions: Mapping[AttentionShape, Decision[AttentionShape]],
    limits: EngineLimits,
    *,
    is_cuda: bool,
    progress: Callable[[str], None],
) -> None:
    """Run what was planned, so that each kernel is compiled (and each launch failure met) before the first request.

    On CUDA every shape, at the shortest and the longest lengths of its buckets and with 1 and several sequences: Triton
    compiles a kernel again for an integer that is 1, or that 16 divides, and decode takes another one for much context.
    After them the whole sampler. On a CPU, where nothing is compiled, the shortest shape of each phase and path.
    """
    layouts: dict[tuple[object, ...], tuple[Phase, Bucket, Bucket, Mask]] = {}
    for shape, decision in decisions.items():
        layout = (shape.phase, shape.query_bucket, shape.context_bucket, shape.mask)
        layouts.setdefault(layout if is_cuda else (shape.phase, decision.path, shape.mask), layout)
    windows = {shape.window for shape in decisions}
    for index, (phase, queries, context, mask) in enumerate(layouts.values(), start=1):
        progress(f"{index}/{len(layouts)} {phase.value} {queries.label} {context.label}")
        batches = _batches(phase, queries, context, limits, is_cuda=is_cuda)
        if is_cuda and phase is Phase.DECODE:
            batches += _large_batches(context, windows, limits)
        for rows in batches:
            batch = synthetic_batch(rows, limits.page_size, verifies=phase is Phase.VERIFY, mask=mask)
            runner.launch(batch).result()
    for num_rows in {1, min(2, limits.max_num_seqs)} if is_cuda else ():
        runner.launch(synthetic_batch([(1, 1)] * num_rows, limits.page_size, _FULL_SAMPLER)).result()


def estimate_longest_silence_s(
    runner: Runner,
    limits: EngineLimits,
    hear: Callable[[Beat | None], None],
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Seconds between two beats of a step of max_num_batched_tokens, from those of a shorter prompt.

    To run a whole step on a CPU may take minutes. `hear` sets what the runner's steps call.
    """
    num_tokens = min(_TIMED_TOKENS, limits.max_num_batched_tokens, limits.max_model_len)
    beats = [clock()]
    hear(lambda: beats.append(clock()))
    try:
        runner.launch(synthetic_batch([(num_tokens, num_tokens)], limits.page_size)).result()
    finally:
        hear(None)
    beats.append(clock())
    return max(later - earlier for earlier, later in pairwise(beats)) * limits.max_num_batched_tokens / num_tokens


def probes_of(
    decisions: Mapping[AttentionShape, Decision[AttentionShape]],
    *,
    page: int,
    page_size: int,
    max_len: int,
    of_two: Container[str] = frozenset(),
) -> list[Batch]:
    """A batch of one sequence for each (phase, path, mask), in its shortest buckets, over `page` alone.

    `of_two`: paths that get another one of two sequences, since other kernels serve it.
    """
    shortest: dict[tuple[Phase, str, Mask], tuple[int, int]] = {}
    for shape, decision in decisions.items():
        lengths = _probe_lengths(shape, max_len)
        if decision.path is None or lengths is None:
            continue
        of_path = shape.phase, decision.path, shape.mask
        shortest[of_path] = min(lengths, shortest.get(of_path, lengths))
    return [
        synthetic_batch([lengths] * num_seqs, page_size, page=page, verifies=phase is Phase.VERIFY, mask=mask)
        for (phase, path, mask), lengths in shortest.items()
        for num_seqs in ((1, 2) if path in of_two else (1,))
    ]


def _probe_lengths(shape: AttentionShape, max_len: int) -> tuple[int, int] | None:
    """(query, context) tokens of a probe: inside of the buckets, near their lower ends; None where no such row fits."""
    # At least 2: a chunk of 1 token is a decode row, and attention of 1 token to itself may launch nothing to be seen.
    query = max(shape.query_bucket.lo + 1, 2, min(_LEAST_QUERY, max_len // 2))
    if shape.phase is Phase.PREFILL:
        return (query, query) if query <= max_len else None
    if shape.phase in (Phase.DECODE, Phase.VERIFY):
        query = 1 if shape.phase is Phase.DECODE else 2
    context = max(shape.context_bucket.lo + 1, query + min(_LEAST_CONTEXT, max_len // 2))
    return (query, context) if context <= max_len else None


def run_largest(runner: Runner, limits: EngineLimits, device: torch.device) -> int:
    """Run the largest batch, whose peak of memory the device then has; return the bytes that were allocated before."""
    num_rows = limits.max_num_seqs
    num_left = limits.max_num_batched_tokens - num_rows
    rows = []
    for _ in range(num_rows):
        length = 1 + min(num_left, limits.max_model_len - 1)
        num_left -= length - 1
        rows.append((length, length))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.launch(synthetic_batch(rows, limits.page_size, _FULL_SAMPLER)).result()
    return before


def _batches(
    phase: Phase, queries: Bucket, context: Bucket, limits: EngineLimits, *, is_cuda: bool
) -> list[list[tuple[int, int]]]:
    """(query_len, context_len) of each row of each batch that warms one shape."""
    lengths = _lengths(phase, queries, context, limits)
    if not is_cuda:
        return [[pair] for pair in lengths[:1]]
    batches = [[pair] for pair in lengths]
    for pair in lengths[:1]:
        counts = (2, 16, limits.max_num_seqs) if phase in (Phase.DECODE, Phase.VERIFY) else (2,)
        fitting = [
            count for count in counts if count <= min(limits.max_num_seqs, limits.max_num_batched_tokens // pair[0])
        ]
        batches += [[pair] * count for count in dict.fromkeys(fitting)]
    return batches


def _large_batches(context: Bucket, windows: Iterable[int | None], limits: EngineLimits) -> list[list[tuple[int, int]]]:
    """Return for each window the fewest rows that are a large decode batch of this bucket, where the limits allow them.

    Contexts are no longer than it takes: rows of all that 256 sequences may hold would take seconds and 300 MB.
    """
    lengths = _lengths(Phase.DECODE, Bucket.LE_128, context, limits)
    batches = set()
    for window in windows if lengths else ():
        shortest, longest = lengths[0][1], lengths[-1][1]
        keys = longest if window is None else min(longest, window)
        num_rows = max(LARGE_SEQS, -(-LARGE_TOKENS // keys))
        if num_rows <= min(limits.max_num_seqs, limits.max_num_batched_tokens):
            batches.add((max(shortest, keys), num_rows))
    return [[(1, length)] * num_rows for length, num_rows in sorted(batches)]


def _lengths(phase: Phase, queries: Bucket, context: Bucket, limits: EngineLimits) -> list[tuple[int, int]]:
    """The shortest and the longest (query_len, context_len) of a shape; none when the limits allow no such row."""
    max_query = min(limits.max_model_len, limits.max_num_batched_tokens)
    most = min(queries.hi or max_query, max_query)
    longest = min(context.hi or limits.max_model_len, limits.max_model_len)
    if phase is Phase.PREFILL:
        return [(queries.lo + 1, queries.lo + 1), (most, most)]
    least = 1 if phase is Phase.DECODE else max(queries.lo + 1, 2)  # a chunk of 1 token is a decode row
    most = 1 if phase is Phase.DECODE else min(most, longest - 1)
    if phase is Phase.VERIFY:
        most = min(most, 1 + limits.max_drafted_tokens)
    pairs = [(least, max(context.lo, least) + 1), (most, longest)]
    return [pair for pair in pairs if least <= pair[0] < pair[1] <= longest]
