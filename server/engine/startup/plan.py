"""The plan of this engine's operators, and the messages that report it to the API process."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.catalog import paths_on
from kernels.collective.paths import without_peer_memory
from kernels.vocabulary.operators import AnyShape
from qualification.common.progress import TimeLeft
from qualification.decision.decision import Decision, Pairs, Policy
from qualification.decision.model_shapes import image_shapes, plan_shapes
from qualification.measure.start_plan import Plan, RunQualification, make_plan
from server.engine.startup.subject import Subject
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


@dataclass(frozen=True, slots=True)
class EvidenceFolders:
    """Folders of evidence. `reviewed`: of matrices; None for this repository's. `own`: of this machine."""

    reviewed: Path | None
    own: Path

    @classmethod
    def of(cls, settings: Settings) -> "EvidenceFolders":
        """Raises SettingsError as `cache_folder` does."""
        return cls(None if settings.matrix is None else Path(settings.matrix), cache_folder(settings))


def plan_operators(
    subject: Subject,
    policy: Policy,
    folders: EvidenceFolders,
    *,
    quarantined: Pairs,
    overridden: Pairs,
    progress: Progress,
    run_qualification: RunQualification,
    reproducible: bool = False,
    unshared: str | None = None,
) -> Plan:
    """Decide every shape the subject's limits allow, measuring what the policy asks for. Raises Unservable.

    reproducible  whether a path may serve only where its bits do not depend on the batch
    unshared  why the ranks share no memory, though their GPUs can address each other; None where nothing refused it
    """
    device, limits = subject.device, subject.limits.serving
    paths, left = paths_on(device), TimeLeft(time.monotonic)
    of_towers = image_shapes(subject.config, limits)
    of_text = plan_shapes(replace(subject.config, tower=None), limits, device.type, subject.shard.world)
    plan = make_plan(
        tuple(dict.fromkeys((*of_text, *of_towers))),
        policy=policy,
        fingerprint=subject.fingerprint,
        device=device,
        matrix_dir=folders.reviewed,
        cache_dir=folders.own,
        quarantined=quarantined,
        overridden=overridden,
        progress=lambda done, total, what: progress("qualifying", f"{done}/{total} ({left(done, total)}) {what}"),
        paths=paths if unshared is None else without_peer_memory(paths, unshared),
        run_qualification=run_qualification,
        reproducible=reproducible,
        of_towers=frozenset(of_towers) - frozenset(of_text),
    )
    refuse_unserved(plan.decisions.values(), plan, policy)
    return plan


def refuse_unserved(
    decisions: Collection[Decision[AnyShape]],
    plan: Plan,
    policy: Policy,
    attested: AttestationReport | None = None,
) -> None:
    """Raises Unservable where no path may serve some shape, by the plan's own `decisions` or by those `attested`."""
    if any(decision.path is None for decision in decisions):
        rows = plan_rows(decisions, plan.evidence)
        of_orders = "".join(f"under --reproducible {problem}; " for problem in plan.order_problems)
        raise Unservable(of_orders + _explain(rows, policy.value), rows, attested)


def cache_folder(settings: Settings) -> Path:
    """Return the folder of this machine's own evidence. Raises SettingsError where it cannot be read.

    A folder that cannot be written to costs the next start only.
    """
    folder = settings.cache_path
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
