"""Faults of the batch's bookkeeping, of page sharing and of sampling, planted around a runner or into a sequence.

None of them shows in a step of one row: an answer that is computed again alone is right.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from msgspec import structs

from server.engine.execution.graph_keys import GraphKey
from server.engine.execution.runner import Launched, ModelRunner
from server.engine.execution.step_buffer import HostViews, StepBuffer, StepMemory
from server.engine.execution.step_writer import StepWriter
from server.engine.scheduling.matcher import Matcher
from server.engine.scheduling.page_keys import PageKeys
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import Batch, Sequence

Edit = Callable[[HostViews], None]


@dataclass(frozen=True)
class Read:
    """A launched batch whose result is broken."""

    launched: Launched
    broken: Callable[[StepResult], StepResult]

    def choose(self) -> None:
        self.launched.choose()

    def result(self) -> StepResult:
        return self.broken(self.launched.result())


@dataclass(frozen=True)
class BrokenRunner:
    """Launches what `batch` makes of each batch, inside of `during`; its result is what `result` makes of it."""

    inner: ModelRunner
    batch: Callable[[Batch], Batch] = lambda it: it
    during: Callable[[Batch], AbstractContextManager[object]] = lambda _: nullcontext()
    result: Callable[[StepResult], StepResult] = lambda it: it

    def launch(self, batch: Batch) -> Read:
        broken = self.batch(batch)
        with self.during(broken):
            return Read(self.inner.launch(broken), self.result)


class BrokenWriter(StepWriter):
    """Writes step buffers, and then edits those of several decode rows."""

    def __init__(self, runner: ModelRunner, edit: Edit) -> None:
        kv = runner.worker.kv
        super().__init__(
            page_size=kv.page_size,
            num_pages=kv.num_pages,
            is_pinned=False,
            token_arrays=runner.worker.token_arrays,
        )
        self._edit = edit

    def write(self, batch: Batch, chosen_at: Mapping[Sequence, int], key: GraphKey | None = None) -> StepBuffer:
        buffer = super().write(batch, chosen_at, key)
        if buffer.layout.num_decode > 1:
            memory = StepMemory(buffer.layout.num_bytes, buffer.data.device)
            size = buffer.layout.num_bytes
            memory.data[:size].copy_(buffer.data)
            self._edit(memory.host_views(buffer.layout))
            buffer.data.copy_(memory.data[:size])
        return buffer


def samples_swapped(result: StepResult) -> StepResult:
    """Two rows' samples are each other's."""
    tokens = result.tokens
    if len(tokens) < 2:
        return result
    return replace(result, tokens=[tokens[1], tokens[0], *tokens[2:]])


def neighbours_page(views: HostViews) -> None:
    """A row reads its neighbour's first page."""
    table = views["decode page_table"]
    table[0, 0] = table[1, 0]


def late_positions(views: HostViews) -> None:
    """Positions are those of the step before."""
    views["positions"][...] = views["positions"].clip(1) - 1


def short_contexts(views: HostViews) -> None:
    """No row sees its newest key."""
    contexts = views["decode context_lens"]
    contexts[...] = contexts.clip(2) - 1


class StaleTokens:
    """The last row's token is that of the step before."""

    def __init__(self) -> None:
        self._latest = 0

    def __call__(self, views: HostViews) -> None:
        tokens = views["token_ids"]
        self._latest, tokens[-1] = int(tokens[-1]), self._latest


def wrong_page_copied(batch: Batch) -> Batch:
    """A fork gets a copy of the page before its own."""
    copies = tuple([(max(0, source - 1), target) for source, target in batch.page_copies])
    return replace(batch, page_copies=copies)


def seed_forgotten(batch: Batch) -> Batch:
    """Sequences that were preempted are drawn by another seed from then on."""
    for seq in batch.sequences:
        if seq.num_preemptions:
            seq.seed = 12345
    return batch


def one_seed_for_all(batch: Batch) -> Batch:
    """All answers of a prompt are drawn by one seed, so that they are clones."""
    for seq in batch.sequences:
        seq.seed = 42
    return batch


@contextmanager
def greedy_for_all(batch: Batch) -> Iterator[None]:
    """Each row takes the likeliest token, whatever its temperature is."""
    wanted = [seq.sampling for seq in batch.sequences]
    for seq in batch.sequences:
        seq.sampling = structs.replace(seq.sampling, temperature=0.0)
    yield
    for seq, own in zip(batch.sequences, wanted, strict=True):
        seq.sampling = own


@contextmanager
def neighbours_penalties(batch: Batch) -> Iterator[None]:
    """The last row of each step is sampled by the first one's penalties."""
    last, wanted = batch.sequences[-1], batch.sequences[0].sampling
    own, frequency = last.sampling, wanted.frequency_penalty
    last.sampling = structs.replace(own, repetition_penalty=wanted.repetition_penalty, frequency_penalty=frequency)
    yield
    last.sampling = own


class NeighboursGrammar:
    """An answer that a grammar binds is bound by the one before it that was queued."""

    def __init__(self) -> None:
        self._latest: Matcher | None = None

    def __call__(self, seq: Sequence) -> None:
        if seq.matcher is not None:
            self._latest, seq.matcher = seq.matcher.copy(), (self._latest or seq.matcher).copy()


class ShortKeys(PageKeys):
    """Names of one byte, of which sixteen are used: other prompts' pages have the same."""

    def first(self, num_pages: int, tokens: list[int]) -> list[bytes]:
        return [bytes([key[0] & 3]) for key in super().first(num_pages, tokens)]

    def each(self, num_pages: int, tokens: list[int]) -> Iterator[bytes]:
        return (bytes([key[0] & 3]) for key in super().each(num_pages, tokens))


class UnchainedKeys(PageKeys):
    """A page's name covers its own tokens, and none of those before it."""

    def first(self, num_pages: int, tokens: list[int]) -> list[bytes]:
        return [*self.each(num_pages, tokens)]

    def each(self, num_pages: int, tokens: list[int]) -> Iterator[bytes]:
        for start in range(0, 16 * num_pages, 16):
            yield str(tokens[start : start + 16]).encode()


def unsalted(seq: Sequence) -> None:
    """All tenants find each other's pages."""
    if seq.page_keys is not None:
        seq.page_keys = PageKeys(16, b"", seq.embedded)


def short_keys(seq: Sequence) -> None:
    if seq.page_keys is not None:
        seq.page_keys = ShortKeys(16, seq.cache_salt, seq.embedded)


def unchained_keys(seq: Sequence) -> None:
    if seq.page_keys is not None:
        seq.page_keys = UnchainedKeys(16, seq.cache_salt, seq.embedded)
