"""An answer computed again: its tokens are given, and each is held against the logits at its place.

Prompt and answer are one prefill in chunks, alone and in pages of their own, so that nothing is in it of what is beside
a sequence in service: other rows, step buffers, pages of others, copies, the order of steps. docs/limits.md ("Replay")
derives how far right log probabilities may be apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.sampling import sampling_tensors
from kernels.vocabulary.shape import Phase
from qualification.model.config import ModelConfig
from qualification.model.forward.choice import Place, is_log_probability, may_be_chosen
from server.engine.execution.grammars import GrammarMatcher, Grammars
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import row_sampling, staged
from server.engine.proof.forced_row import OWNER, ForcedRow
from server.engine.scheduling.scheduler import Borrowed, Scheduler
from server.engine.scheduling.sequence import Batch, Sequence, phase_of
from server.engine.scheduling.states import BatchStates
from server.protocol.served_answer import ServedAnswer

_MAX_LOGITS = 2**23  # values at a time: 32 MiB in fp32, and some of it again for the choice
# With these right answers of twelve small models took at most half of a limit, in fp32 and in bf16.
_Z = 5.0  # deviations
_ROUNDINGS = 12  # to the dtype of a layer's activations, one behind another
_SUMS = 36  # times the length of a layer's sums in fp32: their partial sums are larger than what is left of them
# Tokens of those at a time that are held against the definition of sampling, and logits that are looked at for it: one
# row after another, 1 ms of a core for 4,096 logits and 30 for 128,256.
_MOST_DEFINED, _MOST_DEFINED_LOGITS = 16, 2**20
_FP8 = torch.float8_e4m3fn
# Of keys and values in 8 bits: two right computations round one to neighbours where it lies between them, a step apart,
# with the probability of their difference over the step; at most they err as two roundings do. Behind all layers.
_OF_FP8_CACHE = 4
_APART_OF_MIXTURE = 0.25  # of an answer's tokens, of which a near-tie of experts falls otherwise in 16 bits


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision with which a model's logits can be known.

    variance  of the relative error of the last layer's output, of a right computation
    most_apart  the share of an answer's tokens that may be beyond the limits all the same
    """

    variance: float
    most_apart: float = 0.0

    @classmethod
    def of(cls, config: ModelConfig, *dtypes: torch.dtype) -> "Precision":
        """Return that of a model whose activations and pages are of `dtypes`."""
        of_fp32 = torch.finfo(torch.float32).eps / 2
        unit = max(torch.finfo(dtype).eps for dtype in dtypes if dtype is not _FP8) / 2
        in_fp32 = of_fp32**2 * _SUMS * (config.hidden_size + config.max_position)
        may_route_otherwise = config.has_mixtures and unit > of_fp32
        variance = config.num_layers * (_ROUNDINGS * unit**2 + in_fp32)
        if _FP8 in dtypes:
            step = torch.finfo(_FP8).eps
            variance += _OF_FP8_CACHE * min(step**2 / 6, step * math.sqrt(variance))
        return cls(variance, _APART_OF_MIXTURE if may_route_otherwise else 0.0)

    def limits(self, logits: Tensor) -> Tensor:
        """Return for each row of logits [R, V] how far a log probability may be from that of another right path.

        A logit is a sum over the hidden state, whose errors are relative: the deviation of its error is theirs times
        that of the logits over the vocabulary.
        """
        return _Z * math.sqrt(2 * self.variance) * logits.std(dim=1)


class ForcedAnswers:
    """Computes answers again. Only the stepping thread may call it, while no batch is on its way."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, precision: Precision | None, *, most_tokens: int
    ) -> None:
        """`precision` None: bits must be equal. `most_tokens` of a chunk, for which a request may have to wait."""
        self._runner = runner
        self._scheduler = scheduler
        self._precision = precision
        self._most_tokens = most_tokens

    @property
    def is_exact(self) -> bool:
        return self._precision is None

    @property
    def most_apart(self) -> float:
        """Return the share of an answer's tokens whose log probabilities may be beyond the limits all the same."""
        return 0.0 if self._precision is None else self._precision.most_apart

    def rows(
        self, answer: ServedAnswer, borrowed: Borrowed, *, more: float = 0.0, divisor: int = 1
    ) -> Iterator[list[ForcedRow]]:
        """Yield the rows of an answer's tokens in order, some at a time; empty lists between, where a pause may be.

        more     is added to each limit
        divisor  of the number of tokens of a chunk: sums then come in another order
        Raises BatchError and torch.OutOfMemoryError.
        """
        seq = Sequence(
            OWNER, [*answer.prompt_token_ids, *answer.token_ids], len(answer.prompt_token_ids),
            answer.sampling, answer.seed, 0.0, stop_ids=answer.stop_ids,
        )  # fmt: skip
        end, first, start = len(seq.tokens) - 1, seq.num_prompt - 1, 0
        grammar = self._matcher(answer)
        seq.matcher = None if grammar is None else grammar[1]
        while start < end:
            most = max(1, min(self._most_tokens, self._scheduler.chunk(start, end - start)) // divisor)
            stop = min(end, start + most)
            hidden = self._runner.compute(_batch(seq, start, stop, borrowed))
            yield []
            for at in self._slices(max(first, start), stop):
                rows = hidden[at.start - start : at.stop - start]
                positions = range(at.start + 1, at.stop + 1)
                yield self._rows(seq, positions, rows, _logprobs(answer)[positions.start - seq.num_prompt :],
                                 grammar, more)  # fmt: skip
            start = stop

    def _slices(self, start: int, stop: int) -> Iterator[range]:
        num_rows = max(1, _MAX_LOGITS // self._runner.worker.decoder.config.vocab_size)
        for at in range(start, stop, num_rows):
            yield range(at, min(stop, at + num_rows))

    @torch.inference_mode()
    def _rows(
        self,
        seq: Sequence,
        positions: range,
        hidden: Tensor,
        served: "NDArray[np.float32]",
        grammar: tuple[Grammars, GrammarMatcher] | None,
        more: float,
    ) -> list[ForcedRow]:
        worker = self._runner.worker
        logits = worker.logits(hidden)
        own_ids = seq.tokens[positions.start : positions.stop]
        token_ids = staged(torch.tensor(own_ids), logits.device)
        logprobs = worker.sampler.score(logits, token_ids, 0)[:, 0].tolist()
        limits = torch.zeros(len(positions), device=logits.device)
        most_defined = max(1, min(_MOST_DEFINED, _MOST_DEFINED_LOGITS // logits.shape[1]))
        defined = range(0, len(positions), -(-len(positions) // most_defined))
        raw = logits[:: defined.step].clone()
        if self._precision is not None:
            limits = self._precision.limits(logits) + more
            logits.scatter_add_(1, token_ids[:, None], 2 * limits[:, None])
        sampling = sampling_tensors([row_sampling(seq, at) for at in positions], logits.shape[1], torch.device("cpu"))
        refused: int | None = None
        if grammar is not None:
            grammars, matcher = grammar
            bound = grammars.bound_along(seq, matcher, positions)
            refused = len(bound) - 1 if matcher.has_refused else None
            sampling = replace(sampling, allowed=grammars.allowed(bound, len(positions)))
        margins = limits.tolist()

        def place_at(at: int, row: Tensor) -> Place:
            masked = None if sampling.allowed is None else _masked(sampling.allowed[at], row)
            return _place(seq, positions[at], masked)

        is_defined: dict[int, bool] = {}
        for row, at in zip(raw, defined, strict=True):
            is_scored = is_log_probability(logprobs[at], row, own_ids[at])
            is_defined[at] = is_scored and may_be_chosen(
                row, own_ids[at], seq.sampling, place_at(at, row), margin=margins[at]
            )
        chosen = worker.sampler.choose(logits, staged(sampling, logits.device)).token_ids
        is_chosen = (chosen == token_ids).tolist()
        if self._precision is not None and not all(is_chosen):
            # A rounding may let another token past top-k, top-p or min-p here that was kept out where the answer was
            # served, with any noise: by the definition only those are its rivals that surely are let past.
            again = worker.logits(hidden)  # the sampler has edited them
            for at in (at for at, is_it in enumerate(is_chosen) if not is_it):
                place = place_at(at, again[at])
                is_chosen[at] = may_be_chosen(again[at], own_ids[at], seq.sampling, place, margin=margins[at])
        return [
            ForcedRow(
                logprob,
                float(served[at]) if at < len(served) else None,
                margins[at],
                is_chosen[at] and at != refused,
                is_defined.get(at),
            )
            for at, logprob in enumerate(logprobs)
        ]

    def _matcher(self, answer: ServedAnswer) -> tuple[Grammars, GrammarMatcher] | None:
        grammars, grammar = self._runner.grammars, answer.sampling.grammar
        if grammars is None or grammar is None:
            return None
        matcher = grammars.compile(grammar).result()
        assert isinstance(matcher, GrammarMatcher)
        return grammars, matcher


def _place(seq: Sequence, position: int, masked: Tensor | None) -> Place:
    """Return the place of a token of an answer; `masked` [vocab] bool are those that its grammar forbids there."""
    # A grammar's mask has bans of its own: it may allow nothing but the end.
    banned = frozenset() if masked is not None else seq.stop_ids
    return Place(seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt : position], seq.seed, banned, masked)


def _masked(allowed: Tensor, like: Tensor) -> Tensor:
    """Return the tokens [vocab] bool without a bit in `allowed` [words] int32, on the device of logits `like` [vocab].

    Tokens behind the bits are none that a grammar allows.
    """
    found = np.ones(like.shape[0], dtype=bool)
    bits = np.unpackbits(allowed.numpy().view(np.uint8), bitorder="little")[: found.size]
    found[: bits.size] = bits == 0
    return torch.from_numpy(found).to(like.device)


def _logprobs(answer: ServedAnswer) -> "NDArray[np.float32]":
    return np.frombuffer(answer.logprobs, "<f4")


def _batch(seq: Sequence, start: int, stop: int, borrowed: Borrowed) -> Batch:
    """Return the batch of a sequence's tokens [start, stop), whose earlier ones are in its pages."""
    phase = phase_of(stop - start, stop)
    states = None
    if borrowed.slots is not None:
        zero, own = borrowed.slots
        states = BatchStates((own if start else zero,), (own,))
    return Batch(
        sequences=(seq,),
        query_lens=(stop - start,),
        context_lens=(stop,),
        page_tables=(borrowed.page_table[: -(-stop // borrowed.page_size)],),
        sampled_rows=(),
        num_prefill=int(phase is Phase.PREFILL),
        num_extend=int(phase is Phase.EXTEND),
        states=states,
    )
