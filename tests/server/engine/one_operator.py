"""Small dummy models in an engine on a CPU, of whose plan one operator alone is measured."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from qualification_fakes import evidence

from kernels.operators import RowsShape
from qualification.decision.decision import Policy
from qualification.evidence.evidence import Evidence
from qualification.measure.qualify import Bench, Pair, Progress, qualify
from server.engine.startup.builder import BuiltEngine, build_engine
from server.settings import DeviceChoice, LoadFormat, Settings


def measuring(of: type[RowsShape]) -> Callable[..., None]:
    """Measure shapes of this class: other operators, and the trial of the checker, are other tests'."""

    def run(pairs: list[Pair], bench: Bench, *, progress: Progress, on_evidence: Callable[[Evidence], None]) -> None:
        for shape, path in pairs:
            if not isinstance(shape, of):
                on_evidence(evidence(shape, path, fingerprint=bench.fingerprint))
        own = [pair for pair in pairs if isinstance(pair[0], of)]
        qualify(own, bench, progress=progress, on_evidence=on_evidence, check_checker=lambda *_, **__: ())

    return run


def small_engine(
    folder: Path,
    config: Mapping[str, object],
    run_qualification: Callable[..., None],
    *,
    policy: Policy,
    max_num_batched_tokens: int,
) -> BuiltEngine:
    """Build the engine of a model with dummy weights in `folder`, where its evidence is kept too."""
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        load_format=LoadFormat.DUMMY,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=512,
        page_size=8,
        on_unproven=policy,
        cache_dir=str(folder / "cache"),
        attestation_interval_s=0.0,
    )
    return build_engine(settings, frozenset(), lambda *_: None, run_qualification=run_qualification)
