"""What streams are told: mostly a token each, and nothing else."""

from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import Batch, Sequence, Status
from server.protocol.messages import FinishReason, RequestTimes, TokenDelta


class Deltas:
    """Those that the next output takes along."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._news: set[Sequence] = set()  # those that a decision served of which they were not told
        self._noted: tuple[object, object] = (None, None)  # the decisions and the sequences that were compared last

    def __len__(self) -> int:
        return len(self._deltas)

    def take(self) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def note(self, batch: Batch, result: StepResult) -> None:
        """Keep what served each sequence, and its scores, until it is told. Mostly all is as in the step before."""
        for row, scores in result.scores.items():
            seq = batch.sequences[row]  # after a preemption they come again
            seq.scores = [it for it in seq.scores if it.position < scores.position] + [scores]
        if self._noted[0] is result.uses and self._noted[1] is batch.sequences:
            return
        self._noted = (result.uses, batch.sequences)
        for phase, uses in result.uses.items():
            named = [((use.phase, use.path, use.status), use) for use in uses]
            for row in batch.rows_of(phase):
                seq = batch.sequences[row]
                for name, use in named:
                    if name not in seq.attention and seq.status is not Status.FINISHED:
                        seq.attention[name] = use
                        self._news.add(seq)

    def tell(self, batch: Batch, token_ids: list[int | None], now: float) -> list[Sequence]:
        """Give each sequence its token, which was PENDING. Returns those that it ends.

        A sequence that has finished while its row, computed for nothing, was on its way, is told nothing.
        """
        finished, news, ended = Status.FINISHED, self._news, []
        sequences, context_lens, append = batch.sequences, batch.context_lens, self._deltas.append
        for row, token_id in zip(batch.sampled_rows, token_ids, strict=True):
            seq, index = sequences[row], context_lens[row]
            if seq.status is finished or token_id is None:
                continue
            seq.tokens[index] = token_id
            if seq.num_prompt < index < seq.max_len - 1 and token_id not in seq.stop_ids and seq not in news:
                append(TokenDelta(seq.request_id, [token_id]))
            elif self._tell_all(seq, index, token_id, now):
                ended.append(seq)
        return ended

    def end(self, seq: Sequence, reason: FinishReason, code: str | None = None, message: str | None = None) -> None:
        """Tell a sequence that it ends without another token."""
        self._news.discard(seq)
        uses = list(seq.attention.values())
        self._deltas.append(
            TokenDelta(seq.request_id, [], reason, error_code=code, error_message=message, attention=uses)
        )

    def _tell_all(self, seq: Sequence, index: int, token_id: int, now: float) -> bool:
        """A first or last token, or one with news. Returns whether it is the last."""
        num_generated = index + 1 - seq.num_prompt
        finish_reason = None
        if token_id in seq.stop_ids and num_generated >= seq.sampling.min_tokens:
            finish_reason = FinishReason.STOP
        elif index + 1 >= seq.max_len:
            finish_reason = FinishReason.LENGTH
        is_first = num_generated == 1
        has_news = seq in self._news or finish_reason is not None
        self._news.discard(seq)
        self._deltas.append(
            TokenDelta(
                seq.request_id,
                [token_id],
                finish_reason,
                times=_times(seq, now) if is_first else None,
                attention=list(seq.attention.values()) if has_news else None,
                scores=tuple(seq.scores) if is_first else (),
            )
        )
        return finish_reason is not None


def _times(seq: Sequence, now: float) -> RequestTimes:
    assert seq.scheduled_at is not None
    return RequestTimes(seq.submitted_at, seq.scheduled_at, now, seq.num_chunks, seq.num_cached)
