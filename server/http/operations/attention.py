"""The attention plan in full, and an operator's order to take a kernel path out of service."""

import difflib
import math
from typing import Any

import msgspec

from server.errors import RETRY_AFTER_S, Conflict, NotFound, NotReady
from server.http.services import Services
from server.protocol.messages import EngineReady, PlanRow, QuarantineChanged


def attention_report(services: Services) -> dict[str, Any]:
    """The plan in full, with what has been launched since the start. Raises NotReady while there is none."""
    ready, refused = services.engine.ready, services.engine.refused
    if ready is None and refused is None:
        raise NotReady(services.why_not_ready(), retry_after_s=RETRY_AFTER_S)
    plan = ready.plan if ready else refused.plan if refused else []
    return {
        "model": services.model.name,
        "model_digests": dict(services.model.digests),
        "state": services.engine.state.value,
        "on_unproven": services.settings.on_unproven.value,
        "reproducible": services.settings.reproducible,
        "fingerprint": ready.fingerprint if ready else None,
        "matrix": {"digest": ready.matrix_digest, "verdict": ready.matrix_verdict} if ready else None,
        "layers": msgspec.to_builtins(ready.layers) if ready else None,
        "attention_layers": ready.attention_layers if ready else None,
        "states": msgspec.to_builtins(ready.states) if ready else None,
        "drafts": msgspec.to_builtins(ready.drafts) if ready else None,
        "launches": services.telemetry.metrics.operators.launch_counts(),
        "attestation": msgspec.to_builtins(services.engine.attestations.latest),
        "shadow_checks": [
            msgspec.to_builtins(report) for report in services.telemetry.metrics.operators.shadow_reports
        ],
        "replays": [msgspec.to_builtins(report) for report in services.telemetry.metrics.operators.replay_reports],
        "overridden": [{"path": path, "shape": shape} for path, shape in services.engine.quarantine.by_operator],
        "num_fallbacks": sum(bool(row.fallback_reasons) for row in plan),
        "shapes": [_row(row) for row in plan],
    }


def _row(row: PlanRow) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(row)
    fields["is_fallback"] = bool(row.fallback_reasons)
    fields["rejected"] = {
        path: [{"code": code, "detail": detail} for code, detail in why] for path, why in row.rejected.items()
    }
    fields["evidence"] = {name: _finite(value) for name, value in (row.evidence or {}).items()} or None
    return fields


def _finite(value: float | str | bool) -> float | str | bool | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def named_pairs(path: str, shape: str | None, ready: EngineReady) -> list[tuple[str, str]]:
    """The (path, shape) pairs that an order means: of one shape, or of every shape of the plan.

    Raises NotFound for a path or a shape that the plan does not hold, or for a shape of another operator than the path.
    """
    candidates = {row.shape: {row.path, *row.rejected} - {None} for row in ready.plan}
    paths = sorted({name for names in candidates.values() for name in names if name is not None})
    if path not in paths:
        raise NotFound(f"No path {path[:128]!r} is known here; known are: {', '.join(paths)}.", param="path")
    if shape is not None and shape not in candidates:
        close = difflib.get_close_matches(shape[:256], candidates, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"GET /plan has its {len(candidates)} shapes."
        raise NotFound(f"The plan has no shape {shape[:256]!r}; {hint}", param="shape")
    if shape is not None and path not in candidates[shape]:
        raise NotFound(f"{path} is of another operator than the shape {shape}.", param="shape")
    return [(path, each) for each, names in candidates.items() if path in names and shape in (None, each)]


def order_report(answer: QuarantineChanged | None, ready: EngineReady | None) -> dict[str, Any]:
    """Raises Conflict for an order that would leave a shape without a path, NotReady without an answer."""
    if answer is None:
        raise NotReady("The engine did not answer; GET /attention shows what serves.", retry_after_s=RETRY_AFTER_S)
    if answer.stranded:
        first, *others = sorted(answer.stranded)
        more = f" and {len(others)} more shapes" if others else ""
        message = f"Nothing was changed: no other path may serve {first}{more}; GET /plan has the reasons."
        raise Conflict(message, param="path")
    return {
        "overridden": [{"path": path, "shape": shape} for path, shape in answer.quarantined],
        "fallbacks": [
            {"shape": row.shape, "path": row.path, "wanted": row.wanted, "reasons": row.fallback_reasons}
            for row in (ready.plan if ready else [])
            if row.fallback_reasons
        ],
    }
