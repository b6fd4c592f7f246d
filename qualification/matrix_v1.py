"""Matrix files of schema 1, which held no kernel names and no check of every row: read, so that `matrix show` and
`matrix diff` know them, and stale as a whole, because their suite of checks is older than this version's.
"""

import msgspec

from kernels.fingerprint import Fingerprint
from kernels.shape import AttentionShape
from qualification.evidence import Check, Evidence, Timing


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    shape: AttentionShape
    path: str
    source_digest: str
    checks: tuple[Check, ...]
    tested_query_tokens: int
    tested_context_tokens: int
    at: str
    timing: Timing | None = None
    tflops: float | None = None  # computed from the rest by this version
    bytes_per_second: float | None = None  # so is this
    failure: str | None = None
    suite: int
    commit: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    schema: int
    fingerprint: Fingerprint
    evidence: list[_Row]


def evidence_of_v1(text: str) -> list[Evidence]:
    """Raises msgspec.DecodeError for a text of another shape, ValueError for one that claims this version's suite."""
    file = msgspec.json.decode(text, type=_File)
    if any(row.suite != 1 for row in file.evidence):
        raise ValueError("schema 1 knows suite 1 only")
    return [_evidence(row, file.fingerprint) for row in file.evidence]


def _evidence(row: _Row, fingerprint: Fingerprint) -> Evidence:
    return Evidence(
        shape=row.shape,
        path=row.path,
        source_digest=row.source_digest,
        fingerprint=fingerprint,
        checks=row.checks,
        tested_query_tokens=row.tested_query_tokens,
        tested_context_tokens=row.tested_context_tokens,
        at=row.at,
        timing=row.timing,
        # Schema 1 timed 8 sequences in decode on a GPU, 2 on a CPU, and did not say so.
        timed_sequences=_sequences(row, fingerprint),
        failure=row.failure,
        suite=row.suite,
        commit=row.commit,
    )


def _sequences(row: _Row, fingerprint: Fingerprint) -> int:
    if row.shape.phase.value != "decode":
        return 1
    return 8 if fingerprint.device.value == "cuda" else 2
