"""Runners without a model: what a launch gives is known at once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import PENDING, Batch, Sequence
from server.protocol.messages import PathUse


@dataclass(frozen=True)
class Done:
    """A batch that was computed at its launch."""

    known: StepResult

    def result(self) -> StepResult:
        return self.known


class FakeRunner:
    """Answers each row by a function, else by its sequence's length, so that a neighbour's token would show.

    answer   of a batch and a row: the token; None: no finite logit
    batches  all that were launched
    """

    def __init__(self, answer: Callable[[Batch, int], int | None] | None = None) -> None:
        self.answer = answer or (lambda batch, row: batch.context_lens[row])
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> Done:
        self.batches.append(batch)
        uses = {phase: [PathUse(phase.value, f"fake.{phase.value}", "proven", [])] for phase in Phase}
        answers = [self.answer(batch, row) for row in batch.sampled_rows]
        tokens = [[] if answer is None else [answer] for answer in answers]
        nonfinite = tuple(place for place, answer in enumerate(answers) if answer is None)
        return Done(StepResult(tokens, uses=uses, nonfinite=nonfinite))


class DeviceTwin:
    """Keeps tokens as a device does: what the latest launch chose is known here before the host reads it.

    A sequence's next token is a checksum of all before it, so that a wrong, a lost and a late token all show. Pages
    hold the tokens themselves, so that a page that is taken away too early, or found wrongly, shows too.
    """

    def __init__(self, vocab_size: int = 97, page_size: int = 4) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self._pages: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.log: list[str] = []  # "launch 1", "read 1", ...
        self.num_rows: Counter[str] = Counter()  # computed, by request
        self._latest: dict[Sequence, int] = {}

    def launch(self, batch: Batch) -> "Landing":
        index = 1 + sum(entry.startswith("launch") for entry in self.log)
        self.log.append(f"launch {index}")
        true_tokens = [self._known(seq, end) for seq, end in zip(batch.sequences, batch.context_lens, strict=True)]
        for row, tokens in enumerate(true_tokens):
            self.num_rows[batch.sequences[row].request_id] += 1
            assert batch.query_lens[row] == 1 or PENDING not in batch.sequences[row].tokens[: len(tokens)]
            for place in range(len(tokens) - batch.query_lens[row], len(tokens)):
                self._pages[self._slot(batch, row, place)] = tokens[place]
        for row, tokens in enumerate(true_tokens):
            assert [self._pages[self._slot(batch, row, place)] for place in range(len(tokens))] == tokens
        for source, target in batch.page_copies:
            for offset in range(self.page_size):
                if (source, offset) in self._pages:
                    self._pages[target, offset] = self._pages[source, offset]
        drawn = zip(batch.drawn_sequences, batch.drawn_rows, strict=True)
        chosen = {
            seq: [self.next_token(true_tokens[row][:position]) for position in batch.drawn_positions(row)]
            for seq, row in drawn
        }
        self._latest = {seq: tokens[-1] for seq, tokens in chosen.items()}
        return Landing(self, index, StepResult([*chosen.values()]))

    def _known(self, seq: Sequence, end: int) -> list[int]:
        tokens = seq.tokens[:end]
        assert PENDING not in tokens[:-1]
        if tokens[-1] == PENDING:
            tokens[-1] = self._latest[seq]
        return tokens

    def _slot(self, batch: Batch, row: int, place: int) -> tuple[int, int]:
        return batch.page_tables[row][place // self.page_size], place % self.page_size

    def next_token(self, tokens: list[int]) -> int:
        value = 1
        for token in tokens:
            value = (value * 31 + token + 7) % 1_000_003
        return value % self.vocab_size

    def answer(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the tokens that a request is due."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]


@dataclass(frozen=True)
class Landing:
    twin: DeviceTwin
    index: int
    known: StepResult

    def result(self) -> StepResult:
        self.twin.log.append(f"read {self.index}")
        return self.known
