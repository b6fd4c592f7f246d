"""The answer to an admitted request: its pieces, the kernels that it names, and its receipt."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Scope

from server.edge.direct_stream import DirectStream
from server.edge.keys import cache_salt_of
from server.http.common.provenance import Namer, is_wanted, provenance_of, unnamed, with_provenance
from server.http.generation.admitted import Admitted
from server.http.generation.pieces import Piece, merged, pieces
from server.supervisor.choices import Choices


def namer_of(it: Admitted[Any], scope: Scope, field: bool) -> Namer:
    """Return what adds the kernels to the answer, as errors of this request have them from here on, and the receipt.

    field  whether its body asks for the kernels. Raises InvalidHeader.
    """
    add_receipt = unnamed if it.receipt is None else it.receipt.added
    if not is_wanted(scope, field):
        return add_receipt

    def name(answer: bytes) -> bytes:
        return with_provenance(answer, provenance_of(it.record, it.services.engine.attestations))

    it.context.name_kernels = name
    return lambda answer: add_receipt(name(answer))


def answer_of(it: Admitted[Any], direct: DirectStream | None = None) -> AsyncGenerator[Piece]:
    """The pieces of all answers but for what goes to the `direct` stream, which there is for one answer only.

    They are closed, and what the engine still computes is cancelled, when the request ends.
    """
    services, record, prepared = it.services, it.record, it.prepared
    salt = cache_salt_of(it.context.tenant, prepared.cache_salt)
    num_waiting = len(prepared.jobs)

    def began() -> None:
        nonlocal num_waiting
        num_waiting -= 1
        if not num_waiting:
            it.place.leave(time.monotonic() - record.arrived_at)

    choices = {index: Choices(count) for index, count in prepared.num_choices.items()}
    records = [
        record.sequence(len(job.prompt_token_ids), is_first=is_first)
        for job, is_first in zip(prepared.jobs, prepared.firsts, strict=True)
    ]
    streams = [
        pieces(
            job,
            services.engine,
            services.model.tokenizer,
            of_sequence,
            cache_salt=salt,
            choices=None if job.prompt_index is None else choices.get(job.prompt_index),
            began=began,
            direct=direct,
            gathered=None if it.receipt is None else it.receipt.gathered[at],
        )
        for at, (job, of_sequence) in enumerate(zip(prepared.jobs, records, strict=True))
    ]
    answer = streams[0] if len(streams) == 1 else merged(streams)
    it.context.exits.push_async_callback(answer.aclose)
    return answer
