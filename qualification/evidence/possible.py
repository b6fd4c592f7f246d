"""Values of evidence that no run writes. A file that holds one was made by hand or by mistake, and is refused whole."""

import math
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.shape import AttentionShape
from kernels.vocabulary.value_shape import value_dim_of
from qualification.evidence.evidence import CHECK_LIMITS, SUITE, Check, Evidence, Invariance
from qualification.evidence.full_model import FullModel

_MAX_CLOCK_ERROR = timedelta(days=1)  # of the machine that wrote the file, or of this one

# (least, most): what lies outside is a slip of the pen or an attack on what divides by it, on any machine of this age.
_HEADS = (1, 10_000)
_HEAD_DIM = (1, 10_000)
_SIZE = (1, 10**7)  # of a weight, or a number of experts
_PAGE_SIZE = (1, 10**6)
_TOKENS = (1, 10**8)
_SEQUENCES = (1, 10**6)
_SAMPLES = (1, 10**9)
_MICROSECONDS = (1e-3, 1e9)  # a nanosecond to a quarter of an hour
_SPREAD = (0, 1e6)
_BYTES = (0, 2**60)
_SEED = (-(2**63), 2**64)
_SUITE = (1, 10**6)
_COUNT = (0, 2**60)  # of values
_UNITS = frozenset({"limit", "values", "abs", "rel"})  # the last two of suite 2
_ERROR = (0, math.inf)  # the largest float stands for what is no number


def refuse_impossible(entry: Evidence, *, now: datetime | None = None) -> None:
    """Refuse values that no run writes. `now` None: by this machine's clock. Raises ValueError with its bounds."""
    problem = next(_problems(entry, now or datetime.now(UTC)), None)
    if problem is not None:
        raise ValueError(f"{entry.path or 'a path without a name'} of {entry.shape}: {problem}")


def refuse_impossible_model(model: FullModel, *, now: datetime | None = None) -> None:
    """Refuse timings of a whole model that no run writes. Raises ValueError."""
    problem = next(_problems_of_model(model, now or datetime.now(UTC)), None)
    if problem is not None:
        raise ValueError(f"the whole model {model.name}: {problem}")


def _problems(entry: Evidence, now: datetime) -> Iterator[str]:
    yield from _shape(entry.shape)
    yield from _outside("query tokens", entry.tested_query_tokens, _TOKENS)
    yield from _outside("context tokens", entry.tested_context_tokens, _TOKENS)
    yield from _outside("timed sequences", entry.timed_sequences, _SEQUENCES)
    if entry.timing is not None:
        yield from _outside("p50_us", entry.timing.p50_us, _MICROSECONDS)
        yield from _outside("spread", entry.timing.spread, _SPREAD)
        yield from _outside("samples n", entry.timing.n, _SAMPLES)
    yield from _outside("floor_us", entry.floor_us, _MICROSECONDS)
    yield from _outside("temporary_bytes", entry.temporary_bytes, _BYTES)
    yield from _outside("measured_bytes", entry.measured_bytes, _BYTES)
    yield from _outside("suite", entry.suite, _SUITE)
    yield from _date(entry.at, now)
    yield from _machine(entry.fingerprint)
    yield from _names(entry)
    if entry.invariance is not None:
        yield from _invariance(entry.invariance)
    for check in entry.checks:
        yield from _check(check)
        if entry.suite == SUITE:
            yield from _limit(check)


def _shape(shape: AnyShape) -> Iterator[str]:
    if not isinstance(shape, AttentionShape):  # numbers that do not fit each other have made no shape
        for name, value in ((each.name, getattr(shape, each.name)) for each in fields(shape)):  # type: ignore[arg-type]
            if type(value) is int:
                yield from _outside(name.replace("_", " "), value, _SIZE)
        return
    yield from _outside("heads", shape.num_heads, _HEADS)
    yield from _outside("KV heads", shape.num_kv_heads, _HEADS)
    if shape.num_heads % shape.num_kv_heads:
        yield f"{shape.num_kv_heads} KV heads do not divide {shape.num_heads} heads"
    yield from _outside("head dim", shape.head_dim, _HEAD_DIM)
    yield from _outside("value dim", value_dim_of(shape), (1, shape.head_dim))
    yield from _outside("page size", shape.page_size, _PAGE_SIZE)
    yield from _outside("window", shape.window, _TOKENS)
    yield from _outside("softcap", shape.softcap, (1e-6, 1e6))


def _names(entry: Evidence) -> Iterator[str]:
    if not entry.path:
        yield "its path has no name"
    if not entry.source_digest:
        yield "the digest of its source is empty"
    if not all(entry.all_kernels or ()):
        yield "a kernel has an empty name"
    names = [check.name for check in entry.checks]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        yield f"the check {doubled} stands twice"


def _limit(check: Check) -> Iterator[str]:
    """Check the limit of a check of this suite, which no input changes."""
    known = CHECK_LIMITS.get(check.name)
    if known is None:
        yield f"{check.name} is no check of suite {SUITE}, which has {', '.join(CHECK_LIMITS)}"
    elif (check.limit, check.unit) != known:
        limit, unit = known
        yield f"{check.name}'s limit is {check.limit:g} {check.unit}, suite {SUITE} has {limit:g} {unit}"


def _invariance(seen: Invariance) -> Iterator[str]:
    if not seen.order or not all(point and digest for point, digest in seen.digests):
        yield "an order, or one of its inputs or digests, has no name"
    yield from _outside("values compared", seen.compared, _COUNT)
    yield from _outside("values changed", seen.changed, (0, seen.compared))
    yield from _outside("suite of the order's check", seen.suite, _SUITE)


def _check(check: Check) -> Iterator[str]:
    if not check.name or not check.case:
        yield f"a check has no name or no case: {check.name!r} on {check.case!r}"
    if check.unit not in _UNITS:
        yield f"{check.name} is in {check.unit!r}, expected one of {', '.join(sorted(_UNITS))}"
    for name, value in ((f"{check.name}'s value", check.measured), (f"{check.name}'s limit", check.limit)):
        yield from _outside(name, value, _ERROR)
        if check.unit == "values" and value != int(value):
            yield f"{name} is {value}, a count is whole"
    yield from _outside(f"{check.name}'s seed", check.seed, _SEED)


def _machine(fingerprint: Fingerprint) -> Iterator[str]:
    if not fingerprint.gpu or not fingerprint.torch:
        yield "its machine or its torch has no name"
    yield from _outside("sm", fingerprint.sm, (1, 10_000))
    yield from _outside("threads", fingerprint.threads, (1, 10**6))


def _problems_of_model(model: FullModel, now: datetime) -> Iterator[str]:
    yield from _date(model.at, now)
    yield from _outside("layers", model.layers, (1, 10**6))
    for timing in model.timings:
        where = f"{timing.phase.value} of {timing.tokens} tokens: "
        yield from _outside(where + "tokens", timing.tokens, _TOKENS)
        yield from _outside(where + "sequences", timing.sequences, _SEQUENCES)
        yield from _outside(where + "p50_ms", timing.p50_ms, _MICROSECONDS)
        yield from _outside(where + "spread", timing.spread, _SPREAD)
        yield from _outside(where + "samples n", timing.n, _SAMPLES)
        yield from _outside(where + "attention_ms", timing.attention_ms, (0, _MICROSECONDS[1]))


def _date(at: str, now: datetime) -> Iterator[str]:
    try:
        measured_at = datetime.fromisoformat(at)
        lead = measured_at - now  # TypeError without a time zone
    except (ValueError, TypeError, OverflowError):
        yield f"it was measured at {_shortened(at)!r}, expected a date of ISO 8601 with its time zone"
        return
    if lead > _MAX_CLOCK_ERROR:
        yield (
            f"it was measured at {at}, which is in the future: the clock here says {now.isoformat(timespec='seconds')}"
        )


def _outside(name: str, value: float | None, bounds: tuple[float, float]) -> Iterator[str]:
    least, most = bounds
    if value is not None and not least <= value <= most:  # NaN is in no bounds
        yield f"{name} is {_shortened(_digits(value))}, expected {least:g} to {most:g}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is {value}, expected a finite number"


def _digits(value: float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"  # int(str) is bounded


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
