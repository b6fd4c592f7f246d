"""The receipt of one request's answers: which requests get one, and what is put into it."""

import base64
import struct
import time
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

import msgspec

from qualification.receipt.content import (
    SETTINGS,
    VERSION,
    Bindings,
    CheckResult,
    Content,
    ReceiptAnswer,
    ReceiptGrammar,
    ReceiptPrompt,
    ReceiptSampling,
    UsedDecision,
    canonical,
    digest,
    digest_of_ids,
    digest_of_text,
)
from qualification.receipt.signed import FIELD, sealed
from server.errors import UnsupportedField
from server.http.generation.pieces import Gathered, Piece
from server.http.generation.prepared import Job, Prepared
from server.http.services import Services
from server.protocol.messages import Grammar, LayersReport, LayersStatus
from server.receipt.receipts import Receipts
from server.settings import ReceiptMode, Settings
from server.telemetry.request import RequestRecord
from server.text.answer.deltas import whole_answer

_LEAST_LOGPROB = -9999.0  # in place of minus infinity, as answers have it
FieldsT = TypeVar("FieldsT")


def seeded(services: Services, prepared: Prepared[FieldsT]) -> Prepared[FieldsT]:
    """The request, with a seed for each answer that is drawn, where it gets a receipt: the engine's own is not known.

    Raises UnsupportedField where it asks for a receipt and this server gives none.
    """
    receipts = receipts_for(services, prepared)
    if receipts is None:
        return prepared
    jobs = [
        replace(job, sampling=msgspec.structs.replace(job.sampling, seed=receipts.draw_seed()))
        if job.sampling.temperature and job.sampling.seed is None
        else job
        for job in prepared.jobs
    ]
    return replace(prepared, jobs=jobs)


def receipts_for(services: Services, prepared: Prepared[Any]) -> Receipts | None:
    """The signer of a request's receipt; None where it gets none. Raises UnsupportedField as `seeded` does."""
    mode, receipts = services.settings.receipts, services.receipts
    if mode is ReceiptMode.OFF or receipts is None:
        if prepared.wants_receipt:
            message = f"The field {FIELD!r} is not implemented by this server: it gives no receipts (--receipts off)."
            raise UnsupportedField(message, param=FIELD)
        return None
    is_given = prepared.wants_receipt or (mode is ReceiptMode.ALWAYS and prepared.may_have_receipt)
    return receipts if is_given else None


@dataclass(slots=True)
class ReceiptDraft:
    """The receipt of one request, while its answers come."""

    services: Services
    receipts: Receipts
    record: RequestRecord
    prepared: Prepared[Any]
    unique_id: str
    gathered: list[Gathered] = field(init=False)  # of each job, all that it has answered

    def __post_init__(self) -> None:
        self.gathered = [Gathered(job.index) for job in self.prepared.jobs]

    def added(self, answer: bytes) -> bytes:
        """The answer, or its last event, with the receipt in the JSON object that ends it."""
        content = canonical(self._content())
        key_id, signature = self.receipts.keys.key_id, self.receipts.keys.sign(content)
        self.record.receipted(digest(content))
        end = answer.rindex(b"}")
        receipt = sealed(content, key_id, signature)
        return b"".join((answer[:end], b',"', FIELD.encode(), b'":', receipt, answer[end:]))

    def _content(self) -> Content:
        services, record = self.services, self.record
        settings, ready, digests = services.settings, services.engine.ready, services.model.digests
        attestation = services.engine.attestations.latest
        paths = {} if ready is None else ready.paths
        return Content(
            version=VERSION,
            settings=_given(settings),
            id=self.unique_id,
            created=int(time.time()),
            route=record.trace.name.partition(" ")[2],
            model=services.model.name,
            server_version=services.program.version,
            weights_digest=digests.get("weights"),
            tokenizer_digest=digests.get("tokenizer"),
            matrix_digest=record.matrix_digest,
            fingerprint={} if ready is None else ready.fingerprint,
            reproducible=settings.reproducible,
            decisions=[
                UsedDecision(
                    use.phase,
                    use.path,
                    use.status,
                    use.fallback_reasons,
                    order=paths[use.path].order if use.path in paths else None,
                    source_digest=paths[use.path].source_digest if use.path in paths else None,
                )
                for use in record.uses
            ],
            attestation=None
            if attestation is None
            else CheckResult(attestation.result, int(attestation.at), attestation.id),
            layers=None if ready is None else _layers(ready.layers),
            prompts=self._prompts(has_ids=settings.receipt_token_ids),
            answers=[
                _answer(job, gathered, has_ids=settings.receipt_token_ids)
                for job, gathered in zip(self.prepared.jobs, self.gathered, strict=True)
            ],
        )

    def _prompts(self, *, has_ids: bool) -> list[ReceiptPrompt]:
        by_index = {job.prompt_index: job.prompt_token_ids for job in self.prepared.jobs}
        texts = self.prepared.texts() or (None,) * len(by_index)
        return [
            ReceiptPrompt(
                num_tokens=len(token_ids),
                token_ids_digest=digest_of_ids(token_ids),
                token_ids=token_ids if has_ids else None,
                text_digest=None if text is None else digest_of_text(text),
            )
            for token_ids, text in zip(by_index.values(), texts, strict=True)
        ]


def _layers(report: LayersReport) -> CheckResult | None:
    if report.status is LayersStatus.NOT_CHECKED:
        return None
    return CheckResult(report.status.value, int(report.at))


def _answer(job: Job, gathered: Gathered, *, has_ids: bool) -> ReceiptAnswer:
    piece = gathered.piece
    given = whole_answer([*piece.all_deltas])
    token_ids = [*piece.token_ids]
    assert piece.finish_reason is not None, "a receipt is of whole answers"
    assert job.prompt_index is not None
    return ReceiptAnswer(
        index=job.index,
        prompt=job.prompt_index,
        sampling=_sampling(job, has_ids=has_ids),
        num_tokens=len(token_ids),
        token_ids_digest=digest_of_ids(token_ids),
        token_ids=token_ids if has_ids else None,
        text_digest=digest_of_text(given.content),
        reasoning_digest=digest_of_text(given.reasoning) if given.reasoning else None,
        calls_digest=digest(canonical([[call.name, call.arguments] for call in given.calls])) if given.calls else None,
        logprobs=_logprobs(job, piece) if has_ids and job.sampling.logprobs is not None else None,
        finish_reason=piece.finish_reason,
        is_cut=piece.stop is not None,
    )


def _sampling(job: Job, *, has_ids: bool) -> ReceiptSampling:
    it = job.sampling
    bindings = Bindings(
        stop=list(job.stops),
        logit_bias=[(token_id, repr(bias)) for token_id, bias in it.logit_bias],
        allowed_token_ids=list(it.allowed_token_ids),
        bad_words=[list(word) for word in it.bad_words],
        grammar=_grammar(it.grammar),
    )
    return ReceiptSampling(
        max_tokens=it.max_tokens,
        min_tokens=it.min_tokens,
        temperature=_text(it.temperature),
        top_k=it.top_k,
        top_p=_text(it.top_p),
        min_p=_text(it.min_p),
        repetition_penalty=_text(it.repetition_penalty),
        presence_penalty=_text(it.presence_penalty),
        frequency_penalty=_text(it.frequency_penalty),
        stop_token_ids=list(it.stop_token_ids),
        ignore_eos=it.ignore_eos,
        seed=str(it.seed) if has_ids and it.temperature and it.seed is not None else None,
        bindings=bindings if has_ids else None,
        bindings_digest=digest(canonical(bindings)),
    )


def _text(number: float) -> str:
    """The shortest text that is exactly this number."""
    return repr(float(number))


def _grammar(grammar: Grammar | None) -> ReceiptGrammar | None:
    if grammar is None:
        return None
    return ReceiptGrammar(grammar.kind.value, grammar.text, list(grammar.tokens), _grammar(grammar.before))


def _logprobs(job: Job, piece: Piece) -> str:
    """Log probabilities of the answer's tokens, packed. Those of its prompt, which may stand before them, are not."""
    num_prompt = len(job.prompt_token_ids)
    found = (
        max(logprob, _LEAST_LOGPROB)
        for scores in piece.scores
        for place, (logprob, *_) in enumerate(scores.rows(), start=scores.position)
        if place >= num_prompt
    )
    values = [*islice(found, len(piece.token_ids))]
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _given(settings: Settings) -> dict[str, str | int]:
    """Return the settings that decide which numbers compute, as flags have them, without those at their defaults."""
    found = {}
    for it in msgspec.structs.fields(Settings):
        value = getattr(settings, it.name)
        if it.name in SETTINGS and value != it.default:
            found[it.name] = value.value if isinstance(value, Enum) else value
    return found
