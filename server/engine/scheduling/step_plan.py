"""A step while it is planned."""

from array import array
from dataclasses import dataclass, field

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.sequence import Batch, Sequence

_Row = tuple[Sequence, int, int]  # tokens to compute, and those in pages then


@dataclass(slots=True)
class Work:
    """What the scheduler has chosen so far, besides the decode rows."""

    num_decode: int
    num_preempted: int
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)  # with the number of tokens to compute
    num_queried: int = 0
    num_found: int = 0

    def batch(self, decode: Batch, pool: PagePool) -> Batch:
        """All of it and the decode rows."""
        whole, chunks, single = self._parts()
        decoding = zip(decode.sequences, decode.query_lens, decode.context_lens, strict=True)
        rows = [*whole, *chunks, *decoding, *single]
        sequences, query_lens, context_lens = zip(*rows, strict=True)
        return Batch(
            sequences=sequences,
            query_lens=query_lens,
            context_lens=context_lens,
            page_tables=(*_tables(whole, pool), *_tables(chunks, pool), *decode.page_tables, *_tables(single, pool)),
            sampled_rows=tuple([row for row, (seq, _, n) in enumerate(rows) if n == len(seq.tokens)]),
            num_prefill=len(whole),
            num_extend=len(chunks),
            num_preempted=self.num_preempted,
            num_queried=self.num_queried,
            num_found=self.num_found,
        )

    def _parts(self) -> tuple[list[_Row], list[_Row], list[_Row]]:
        """The prompts that are whole, chunks behind a context, and single tokens, which are decode rows."""
        parts: tuple[list[_Row], list[_Row], list[_Row]] = ([], [], [])
        for seq, query_len in self.prompts:
            context_len = seq.num_computed + query_len
            part = 0 if query_len == context_len else 2 if query_len == 1 else 1
            parts[part].append((seq, query_len, context_len))
        return parts


def _tables(rows: list[_Row], pool: PagePool) -> "list[array[int]]":
    return [pool.table(seq.request_id, pool.pages_for(num_tokens)) for seq, _, num_tokens in rows]
