"""The tokens of each step as deltas for the API process; what ends a sequence is decided in sequence.py."""

from collections import OrderedDict

import msgspec

from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import Batch, Sequence, SequenceStatus
from server.protocol.messages import FinishReason, PathUse, RequestTimes, TokenDelta

_MOST_IMAGES = 4096  # digests, 32 bytes each, whose decisions are known


class Outputs:
    """The deltas that the next StepOutput takes along."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._with_new_uses: set[Sequence] = set()  # served by a decision that no delta of theirs has reported yet
        self._compared: tuple[object, object] = (None, None)  # the uses and the sequences of the step before
        # By an image's digest, those computed last: what computed it serves each prompt that has it.
        self._image_uses: OrderedDict[bytes, list[PathUse]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deltas)

    def take(self) -> list[TokenDelta]:
        """Return the deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def record_uses(self, batch: Batch, result: StepResult) -> None:
        """Record which decisions served each sequence, and its prompt log probabilities, until they are reported.

        Mostly both are those of the step before, and nothing is done.
        """
        for row, scores in result.prompt_scores.items():
            seq = batch.sequences[row]  # after a preemption the same positions are computed again
            seq.scores = [it for it in seq.scores if it.position < scores.position] + [scores]
        for row, pooled in result.pooled.items():
            batch.sequences[row].pooled = pooled
        if batch.num_prefill or batch.num_extend:
            self._record_images(batch, result)
        if self._compared[0] is result.uses and self._compared[1] is batch.sequences:
            return
        self._compared = (result.uses, batch.sequences)
        forked: dict[int, list[Sequence]] = {}
        for fork in batch.forks:
            seq, leader = fork.sequence, batch.sequences[fork.row]
            seq.path_uses, seq.scores, seq.pooled = dict(leader.path_uses), list(leader.scores), leader.pooled
            forked.setdefault(fork.row, []).append(seq)
            if seq.status is not SequenceStatus.FINISHED:
                self._with_new_uses.add(seq)
        for phase, uses in result.uses.items():
            named = [((use.phase, use.path, use.status), use) for use in uses]
            for row in batch.rows_of(phase):
                for seq in (batch.sequences[row], *forked.get(row, ())):
                    for name, use in named:
                        if name not in seq.path_uses and seq.status is not SequenceStatus.FINISHED:
                            seq.path_uses[name] = use
                            self._with_new_uses.add(seq)

    def _record_images(self, batch: Batch, result: StepResult) -> None:
        """Record what has computed the images of a step's prompts: in this step, or for an earlier prompt."""
        tower = result.tower
        computed: set[bytes] = set()
        if tower is not None:
            computed = {held.span.digest for held in batch.embeddings if held.span.image is not None}
            for digest in computed:
                self._image_uses[digest] = tower.uses
                self._image_uses.move_to_end(digest)
        while len(self._image_uses) > _MOST_IMAGES:
            self._image_uses.popitem(last=False)
        for row in range(batch.num_rows):
            seq = batch.sequences[row]
            if not seq.embedded or seq.status is SequenceStatus.FINISHED:
                continue
            own = {span.digest for span in seq.embedded if span.image is not None}
            if tower is not None and own & computed:
                seq.tower_runs.append((tower, len(own & computed)))
            for digest in own:
                for use in self._image_uses.get(digest, ()):
                    name = use.phase, use.path, use.status
                    if name not in seq.path_uses:
                        seq.path_uses[name] = use
                        self._with_new_uses.add(seq)

    def add_tokens(self, batch: Batch, result: StepResult, now: float) -> list[Sequence]:
        """Replace each sampled sequence's PENDING token by its id and add its delta. Return the sequences that end.

        A sequence that finished while this step was computed gets no delta. Sequences of a step that verifies drafted
        tokens have theirs already: those of the result.
        """
        finished, with_news, ended = SequenceStatus.FINISHED, self._with_new_uses, []
        context_lens, append = batch.context_lens, self._deltas.append
        if result.token_scores:
            with_news = with_news | self._add_scores(batch, result)
        if batch.verifies:
            got = [it for it in zip(batch.drawn_sequences, result.tokens, strict=True) if it[0].status is not finished]
            return [seq for seq, new in got if new and self._add_full_delta(seq, len(seq.tokens), new, now)]
        for seq, row, new in zip(batch.drawn_sequences, batch.drawn_rows, result.tokens, strict=True):
            if seq.status is finished or not new:
                continue
            index, token_id = context_lens[row], new[0]
            seq.tokens[index] = token_id
            # Neither first nor last, and no news: most tokens, 256 a step.
            is_inner = seq.num_prompt < index < seq.max_len - 1 and token_id not in seq.stop_ids
            if is_inner and seq not in with_news and seq.matcher is None:
                append(TokenDelta(seq.request_id, new))
            elif self._add_full_delta(seq, index + 1, new, now):
                ended.append(seq)
        return ended

    def add_end(self, seq: Sequence, reason: FinishReason, code: str | None = None, message: str | None = None) -> None:
        """End a sequence without another token."""
        self._with_new_uses.discard(seq)
        uses = list(seq.path_uses.values())
        self._deltas.append(
            TokenDelta(seq.request_id, [], reason, error_code=code, error_message=message, path_uses=uses)
        )

    def _add_scores(self, batch: Batch, result: StepResult) -> set[Sequence]:
        """Give sequences the scores of their new tokens. Return those that will be reported."""
        sequences = batch.drawn_sequences
        with_news = set()
        for place, scores in result.token_scores.items():
            seq = sequences[place]
            if seq.record is not None:
                seq.record.add(scores, batch.num_rows)
            if seq.sampling.logprobs is not None:
                seq.scores.append(scores)
                with_news.add(seq)
        return with_news

    def _add_full_delta(self, seq: Sequence, num_tokens: int, new: list[int], now: float) -> bool:
        """Add the delta of a first or last token, of one with news, or of several. Return whether it is the last.

        `new`: the newest of the sequence's first `num_tokens` tokens.
        """
        finish_reason = seq.finish_reason(num_tokens)
        is_first = num_tokens == seq.num_prompt + 1
        reports_uses = seq in self._with_new_uses or finish_reason is not None
        self._with_new_uses.discard(seq)
        scores, seq.scores = tuple(seq.scores), []
        self._deltas.append(
            TokenDelta(
                seq.request_id,
                [] if seq.sampling.pooling is not None else new,
                finish_reason,
                times=_times(seq, now) if is_first else None,
                path_uses=list(seq.path_uses.values()) if reports_uses else None,
                pooled=seq.pooled,
                scores=scores,
            )
        )
        return finish_reason is not None


def _times(seq: Sequence, now: float) -> RequestTimes:
    assert seq.scheduled_at is not None
    times = RequestTimes(seq.submitted_at, seq.scheduled_at, now, seq.num_chunks, seq.num_cached)
    if not seq.tower_runs:
        return times
    seconds = [run.seconds for run, _ in seq.tower_runs]
    known = [it for it in seconds if it is not None]
    tower_s = sum(known) if len(known) == len(seconds) else None
    return msgspec.structs.replace(times, num_computed_images=sum(it for _, it in seq.tower_runs), tower_s=tower_s)
