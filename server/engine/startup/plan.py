"""The plan of this engine's operators, and the messages that report it to the API process."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from kernels.catalog import paths_on
from kernels.collective.paths import without_peer_memory
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from qualification.common.progress import TimeLeft
from qualification.decision.decision import Decision, Pairs
from qualification.decision.model_shapes import plan_shapes
from qualification.measure.start_plan import Plan, RunQualification, make_plan
from qualification.model.config import ModelConfig
from server.engine.startup.limits import EngineLimits
from server.errors import SettingsError
from server.protocol.messages import AttestationReport, PlanRow
from server.protocol.plan_rows import plan_rows, rejections_here
from server.settings import Settings

Progress = Callable[[str, str], None]  # stage, detail


class Unservable(Exception):
    """Some shape has no path that may serve it under the policy."""

    def __init__(self, message: str, plan: list[PlanRow], attested: AttestationReport | None = None) -> None:
        """`attested`: what may have taken the path away."""
        super().__init__(message)
        self.plan = plan
        self.attested = attested


def plan_operators(
    settings: Settings,
    config: ModelConfig,
    limits: EngineLimits,
    *,
    fingerprint: Fingerprint,
    device: torch.device,
    quarantined: Pairs,
    overridden: Pairs,
    progress: Progress,
    run_qualification: RunQualification,
    unshared: str | None = None,
) -> Plan:
    """Decide every shape these limits allow, measuring what the policy asks for. Raises Unservable.

    unshared  why the ranks share no memory, though their GPUs can address each other; None where nothing refused it
    """
    paths, left = paths_on(device), TimeLeft(time.monotonic)
    plan = make_plan(
        plan_shapes(config, limits.serving, device.type, settings.tensor_parallel_size),
        policy=settings.on_unproven,
        fingerprint=fingerprint,
        device=device,
        matrix_dir=None if settings.matrix is None else Path(settings.matrix),
        cache_dir=cache_folder(settings),
        quarantined=quarantined,
        overridden=overridden,
        progress=lambda done, total, what: progress("qualifying", f"{done}/{total} ({left(done, total)}) {what}"),
        paths=paths if unshared is None else without_peer_memory(paths, unshared),
        run_qualification=run_qualification,
    )
    refuse_unserved(plan.decisions.values(), plan, settings)
    return plan


def refuse_unserved(
    decisions: Collection[Decision[AnyShape]],
    plan: Plan,
    settings: Settings,
    attested: AttestationReport | None = None,
) -> None:
    """Raises Unservable where no path may serve some shape, by the plan's own `decisions` or by those `attested`."""
    if any(decision.path is None for decision in decisions):
        rows = plan_rows(decisions, plan.evidence)
        raise Unservable(_explain(rows, settings.on_unproven.value), rows, attested)


def cache_folder(settings: Settings) -> Path:
    """Return the folder of this machine's own evidence. Raises SettingsError where it cannot be read.

    A folder that cannot be written to costs the next start only.
    """
    folder = Path.home() / ".cache" / "hallmark" if settings.cache_dir is None else Path(settings.cache_dir)
    try:
        (folder / "any").stat()  # exists() hides every error from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        return folder
    except OSError as error:
        raise SettingsError(f"the cache folder {folder} cannot be used: {error.strerror}") from error
    return folder


def _explain(rows: Sequence[PlanRow], policy: str) -> str:
    """Name the shapes that no path may serve, and for the first of them the rejections of this machine's paths."""
    unserved = [row for row in rows if row.path is None]
    first = unserved[0]
    reasons = "; ".join(
        f"{path}: " + ", ".join(f"{code} ({detail})" for code, detail in why)
        for path, why in rejections_here(first).items()
    )
    others = f" and {len(unserved) - 1} more shapes" if len(unserved) > 1 else ""
    return f"under on-unproven={policy} no path may serve {first.shape}{others}: {reasons}"
