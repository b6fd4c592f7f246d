"""The suites of a bench: sweeps, each with its peers, and the full suite of the docs. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.attention.cases import BenchCase, Sweep, cases_of
from kernels.vocabulary.shape import Dtype, Phase

_PREFILL, _EXTEND, _DECODE = (Phase.PREFILL,), (Phase.EXTEND,), (Phase.DECODE,)
_PADDED = (80, 96, 112, 192)  # head dims between, in tiles of the next one's or cut from them
# FlashAttention 3 is fastest over pages as long as its steps: 128 tokens, 80 at a head dim of 256 (two of them: 160).
FA3_PAGE_SIZES = (128, 160)
_BATCHES = tuple(range(1, 65))
_BEST_PAGES = (((64, 128), "fa3-page128"), ((256,), "fa3-page160"))  # by head dim


@dataclass(frozen=True, slots=True)
class Part:
    """A sweep and the peers (patterns) it is measured beside; None: beside all there are."""

    sweep: Sweep
    peers: tuple[str, ...] | None = None


def full_suite(dtype: Dtype) -> list[Part]:
    """Every case of docs/benchmarks, the most important first. FlexAttention takes seconds to compile."""

    def part(phases: tuple[Phase, ...], *peers: str, **changes: object) -> Part:
        return Part(replace(Sweep(dtype, phases, mixes=()), **changes), peers)  # type: ignore[arg-type]

    long, contexts = (8192, 16384, 32768), (8192, 32768, 131072)
    return [
        part(_PREFILL, "fa2", "cudnn", "flex", "fa3", lengths=(8192,)),
        part(_PREFILL, "fa2", "cudnn", "fa3"),
        *(part(_EXTEND, "fa3", page, head_dims=dims, extend_contexts=contexts) for dims, page in _BEST_PAGES),
        *(part(_DECODE, "fa2", "cudnn", "fa3", page, head_dims=dims, batches=(1, 8, 64)) for dims, page in _BEST_PAGES),
        *(part(_DECODE, "fa3", page, head_dims=dims, batches=(256,)) for dims, page in _BEST_PAGES),
        *(
            part(_DECODE, "fa3", page, head_dims=dims, batches=(1,), decode_contexts=(131072,))
            for dims, page in _BEST_PAGES
        ),
        part(_PREFILL, "fa3", lengths=(), mixes=(2, 4, 8, 16, 64)),
        part(_PREFILL, "flex", "fa3", head_dims=(128,), lengths=(8192,), windows=(1024,)),
        part(_PREFILL, "fa3", lengths=long, windows=(1024, 4096)),
        part(_PREFILL, "fa3", lengths=(2048, 8192), softcap=30.0),
        part(_PREFILL, "fa3", lengths=(2048, 8192), sinks=True),
        part(_DECODE, "fa3", batches=(1, 8, 64), decode_contexts=(4096,), queries=(2, 4, 8)),
        part(_PREFILL, "cudnn", "fa3", head_dims=_PADDED, lengths=(2048, 8192)),
        part(_EXTEND, "fa3", head_dims=_PADDED, extend_contexts=(8192,)),
        part(_DECODE, "fa3", head_dims=_PADDED, batches=(1, 8, 64), decode_contexts=(4096,)),
        *(part(_DECODE, "fa3", head_dims=(dim,), batches=_BATCHES, decode_contexts=(4096,)) for dim in (128, 64, 256)),
        part(_DECODE, "fa2", "flex", "fa3", head_dims=(128,), batches=(2, 64), decode_contexts=(8192,)),
        part(_EXTEND, "fa2", "flex", "fa3", head_dims=(128,), chunks=(1024,), extend_contexts=(8192,)),
        part(_DECODE, "fa3", batches=(), mixes=(8, 64)),
    ]


def chosen_parts(parts: Sequence[Part], phases: Sequence[Phase], head_dims: Sequence[int]) -> list[Part]:
    """Reduce each part to these phases and head dims, where any are named."""
    found = []
    for part in parts:
        sweep = part.sweep
        kept = replace(
            sweep,
            phases=tuple(phase for phase in sweep.phases if not phases or phase in phases),
            head_dims=tuple(dim for dim in sweep.head_dims if not head_dims or dim in head_dims),
        )
        found.append(replace(part, sweep=kept))
    return found


def new_cases(parts: Sequence[Part]) -> Iterator[tuple[Part, list[BenchCase]]]:
    """Return each part with those of its cases that no part before it has."""
    seen: set[BenchCase] = set()
    for part in parts:
        cases = [case for case in cases_of(part.sweep) if case not in seen]
        seen.update(cases)
        yield part, cases
