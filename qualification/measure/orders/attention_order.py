"""The check of a path of attention that claims an order: bits alone, beside others, and however prompts are chunked."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, islice

import torch

from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from qualification.evidence.evidence import Invariance
from qualification.measure.orders.first_bits import FirstBits
from qualification.measure.orders.sequences import Content, Part, Pool

_BATCHES = (2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 100, 128, 255, 256)  # sequences of decode
_BATCHES_CPU = (2, 3, 5, 8, 17, 64, 256)
_LARGE = 128  # sequences: of more one call is enough, whose places are even and odd ones already
_MANY = 253  # short neighbours of a prompt
_VERIFIED = 4  # tokens of a sequence that are verified together
_EVEN, _ODD = (256,), (1, 97, 3, 130, 64, 17, 200)  # tokens of chunks, in turn
_NEIGHBOURS = tuple(Content)
_MOST_CHUNK = 2048  # tokens of the largest chunk that is tried
_QUERIES = (1, 5, 130, 63)  # of neighbours, in turn

Batch = tuple[str, list[Part]]


def check_attention_order(
    run: RunAttention, shape: AttentionShape, device: torch.device, *, seed: int, order: str, ends_early: bool = False
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught."""
    pool, bits = Pool(shape, device, seed=seed), FirstBits(ends_early=ends_early)
    for name, parts in _batches(pool):
        if bits.is_ended:
            break
        out = pool.run(run, parts)
        ends = list(accumulate(part.queries for part in parts))
        for place, (part, end) in enumerate(zip(parts, ends, strict=True)):
            if isinstance(part.of, Content):
                continue
            rows = torch.arange(part.keys - part.queries, part.keys, device=device)
            if not pool.is_kept(part.of):
                kept = torch.tensor(pool.some_rows(part.of), device=device)
                rows = rows[torch.isin(rows, kept)]
            found = out[end - part.keys + rows]
            where = f"{name}, {len(parts)} sequences, sequence {place}"
            bits.meet(_name(part.of), part.of, rows, found, where)
    digested = {_name(it): torch.tensor(pool.some_rows(it), device=device) for it in pool.lengths}
    return bits.result(order, digested)


def _name(length: int) -> str:
    return f"{length} tokens"


def _batches(pool: Pool) -> Iterator[Batch]:
    if pool.shape.phase is Phase.PREFILL:
        return _prefill(pool)
    return _extend(pool) if pool.shape.phase is Phase.EXTEND else _decode(pool)


def _within(pool: Pool, parts: Sequence[Part]) -> list[Part]:
    """Return the parts, and where all are too short for the shape's buckets one more that is not."""
    queries, context = pool.shape.query_bucket.lo, pool.shape.context_bucket.lo
    if pool.shape.phase is Phase.PREFILL:
        queries = context
    if pool.shape.phase in (Phase.DECODE, Phase.VERIFY):
        queries = 0
    longest = max(part.queries for part in parts), max(part.keys for part in parts)
    if longest[0] > queries and longest[1] > context:
        return list(parts)
    least = queries + 1
    return [*parts, Part(Content.ORDINARY, max(context + 1, least), least)]


def _prefill(pool: Pool) -> Iterator[Batch]:
    """Prompts alone; between neighbours of several lengths and contents; among many; and cut behind some token."""
    whole = [Part(length, length, length) for length in pool.lengths]
    for part in whole:
        yield "alone", _within(pool, [part])
    longest = whole[-1]
    yield "between", _within(pool, [_prompt(Content.NAN, 64), longest, _prompt(Content.HUGE, 3)])
    short = [part for part in whole if pool.is_kept(part.keys)]
    most = pool.longest
    for name, parts in (("mixed", short), ("mixed backwards", short[::-1])):
        mixed: list[Part] = []
        for turn, part in enumerate(parts):
            content = _NEIGHBOURS[(turn + len(name)) % len(_NEIGHBOURS)]
            mixed += [_prompt(content, min(_QUERIES[(turn + len(name)) % len(_QUERIES)], most)), part]
        yield name, _within(pool, [*mixed, Part(Content.ZERO, 0, 0), _prompt(Content.NAN, 1)])
    first = short[0]
    some = [_prompt(content, 1 + place % 5) for place, content in enumerate(islice(cycle(_NEIGHBOURS), _MANY))]
    some = [part if part.keys <= most else _prompt(Content.ORDINARY, 1) for part in some]
    yield "many", _within(pool, [first, *some[: _MANY // 2], first, *some[_MANY // 2 :], first])
    if pool.shape.mask is not Mask.FULL:  # where later tokens change those before them
        cut = [Part(part.keys, part.keys * 2 // 3, part.keys * 2 // 3) for part in short if part.keys > 2]
        if cut:
            yield "first chunks", _within(pool, cut)


def _prompt(content: Content, num_tokens: int) -> Part:
    return Part(content, num_tokens, num_tokens)


def _extend(pool: Pool) -> Iterator[Batch]:
    """Last chunks alone; all chunks of one size and of odd ones beside neighbours; and many that go on by one token."""
    most = min(pool.shape.query_bucket.hi or _MOST_CHUNK, _MOST_CHUNK)
    whole = [it for it in pool.lengths if pool.is_kept(it)]
    even = [part for length in whole for part in _chunks(length, _EVEN, most)]
    for length in pool.lengths:
        if not pool.is_kept(length):
            rows = pool.some_rows(length)
            even += [Part(length, row + 1, min(most, row + 1, 1 + 37 * place)) for place, row in enumerate(rows)]
    yield "even chunks", _within(pool, even)
    for length in pool.lengths:
        size = min(most, length, 130)
        yield "a chunk alone", _within(pool, [Part(length, length, size)])
    odd = [part for length in whole for part in _chunks(length, _ODD, most)]
    mixed = [it for turn, part in enumerate(odd) for it in (_chunk(pool, turn, most), part)]
    yield "odd chunks", _within(pool, mixed)
    yield "odd chunks backwards", _within(pool, mixed[::-1])
    longest = [Part(length, length, min(most, length)) for length in whole]
    yield "the longest chunks", _within(pool, [Part(Content.NAN, 1, 1), *longest])
    first = pool.lengths[0]
    single = [Part(Content.ORDINARY, 1 + place % 7, 1) for place in range(_MANY)]
    ends = [Part(first, first, 1), Part(first, max(1, first // 2), 1)]
    yield "many", _within(pool, [ends[0], *single, *ends])


def _chunks(length: int, sizes: Sequence[int], most: int) -> list[Part]:
    parts, start = [], 0
    for size in cycle(sizes):
        end = min(length, start + min(size, most))
        parts.append(Part(length, end, end - start))
        if end == length:
            return parts
        start = end
    return parts


def _chunk(pool: Pool, turn: int, most: int) -> Part:
    """Return a chunk of a neighbour, of another length and content each time, which no bucket forbids."""
    queries = min(_QUERIES[turn % len(_QUERIES)], most, pool.longest)
    keys = min(queries + 67 * turn % 400, pool.longest)
    return Part(_NEIGHBOURS[turn % len(_NEIGHBOURS)], keys, queries)


def _decode(pool: Pool) -> Iterator[Batch]:
    """Each token alone; then all of them in each number of sequences, at even and odd places between neighbours."""
    most = _VERIFIED if pool.shape.phase is Phase.VERIFY else 1
    tokens = [Part(it, row + 1, min(most, row + 1)) for it in pool.lengths for row in pool.some_rows(it)]
    for part in tokens:
        yield "alone", _within(pool, [part])
    lengths = [min(it, pool.longest) for it in (1, 64, 600, pool.longest)]
    turn = 0
    for count in _BATCHES_CPU if pool.device.type == "cpu" else _BATCHES:
        for call in range(max(1 if count > _LARGE else 2, -(-2 * len(tokens) // count))):
            parts: list[Part] = []
            for place in range(count):
                if (place + call) % 2:
                    turn += 1
                    parts.append(tokens[turn % len(tokens)])
                else:
                    keys = lengths[(place + call) // 2 % len(lengths)]
                    parts.append(Part(_NEIGHBOURS[(turn + call) % len(_NEIGHBOURS)], keys, min(most, keys)))
            yield "mixed", _within(pool, parts)
