"""Faults around kernels, planted: a path that lies, evidence of another stack, a broken file, an unproven model."""

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from planted_kernels import Found, Place
from running_server import DEMO, Server, free_port, running

from kernels.catalog import ALL_PATHS, PATHS, path_named
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import Tier
from qualification.common.exit_code import ExitCode
from qualification.decision.decision import Policy
from qualification.evidence.matrix import MatrixError, load_matrix, save_matrix
from server.cli import main as cli
from server.engine.startup import builder
from server.engine.startup.builder import BuiltEngine, build_engine
from server.engine.startup.plan import Unservable
from server.settings import DeviceChoice, Settings

MAX_LEN = 256  # tokens: seven shapes
HALLMARK = (sys.executable, "-m", "server.cli")
FALLBACKS = "hallmark_attention_fallback_total"


def qualify_demo(place: Place) -> list[str]:
    """The command that proves the bundled model's shapes here, by the paths of the first tier and math."""
    device = Device.CUDA if place.is_cuda else Device.CPU
    first = [path for path in ALL_PATHS if path.tier is Tier.FIRST and path.run is not None]
    paths = [path.name for path in first if device in path.limits.devices]
    flags = ["--preset", "demo", "--max-model-len", str(MAX_LEN), "--quick", "--out-dir", str(place.matrices)]
    return [*HALLMARK, "qualify", *flags, "--paths", *paths, "sdpa.math"]


def _file(folder: Path) -> Path:
    return next(folder.glob("*/demo.json"))


def _settings(place: Place, folder: Path, **changes: Any) -> Settings:
    known = Settings(
        device=DeviceChoice.CUDA if place.is_cuda else DeviceChoice.CPU,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        kv_cache_tokens=4096,
        on_unproven=Policy.REFUSE,
        matrix=str(folder),
        cache_dir=str(place.folder / "cache"),
    )
    return msgspec.structs.replace(known, **changes)


def _build(settings: Settings) -> BuiltEngine:
    return build_engine(settings, frozenset(), lambda *_: None)


def _refusal(settings: Settings) -> str:
    """Why no engine serves under these settings. Raises AssertionError where one does."""
    try:
        _build(settings)
    except Unservable as refused:
        return str(refused)
    raise AssertionError("it was served")


def lying_path(place: Place, *, has_graphs: bool) -> Found:
    """A path of prefill and one of decode silently run another one's kernel; before that all of them are honest."""
    settings = _settings(place, place.matrices, cuda_graphs=has_graphs)
    honest = _build(settings)
    attested = honest.attested
    liars = {row.path for row in honest.ready.plan if row.phase in ("prefill", "decode") and row.path is not None}
    del honest
    _free(place)
    builder.PATHS = tuple(
        replace(path, run=path_named(_other(path.name, place)).run) if path.name in liars else path for path in PATHS
    )
    try:
        lying = _build(settings)
    finally:
        builder.PATHS = PATHS
    report = lying.attested
    assert attested is not None
    assert report is not None
    is_caught = attested.result == "match" and report.result == "mismatch"
    is_caught &= {path for path, _ in report.quarantined} == liars
    after = sorted({str(row.path) for row in lying.ready.plan if row.phase in ("prefill", "decode")})
    del lying
    _free(place)
    return is_caught and not set(after) & liars, {
        "honest": attested.result,
        "honest_busy_s": round(attested.busy_s, 4),
        "liars": sorted(liars),
        "result": report.result,
        "replays": [batch.phase for batch in report.batches if batch.is_replay],
        "said": [batch.detail for batch in report.batches if batch.detail is not None],
        "serves_then": after,
    }


def _other(name: str, place: Place) -> str:
    if not place.is_cuda:
        return "sdpa.math"
    family, phase, *_ = name.split(".")
    return f"triton.{phase}" if family == "gluon" else f"gluon.{phase}.hopper"


def _free(place: Place) -> None:
    gc.collect()
    if place.is_cuda:
        torch.cuda.empty_cache()


def other_torch(place: Place) -> Found:
    """The same proofs, said to be of another torch."""
    folder = place.folder / "other-torch"
    was = load_matrix(_file(place.matrices))
    file = folder / _file(place.matrices).relative_to(place.matrices)
    moved = [replace(it, fingerprint=replace(it.fingerprint, torch="2.10.0+cu130")) for it in was.evidence.values()]
    save_matrix(file, moved)
    said = _refusal(_settings(place, folder))
    code = cli.main(["matrix", "verify", str(file)])
    is_caught = "changed since it was measured: torch)" in said and code == ExitCode.ENVIRONMENT
    return is_caught, {"said": said[:300], "exit_code_of_verify": int(code)}


def flipped_byte(place: Place) -> Found:
    """One digit of one measured time; then each of 500 bytes, spread over the file, in turn."""
    folder = place.folder / "flipped"
    shutil.copytree(place.matrices, folder)
    file = _file(folder)
    whole = file.read_bytes()
    where = whole.index(b'"p50_us":') + len(b'"p50_us":')
    file.write_bytes(_flipped(whole, where, 1))
    said = _refusal(_settings(place, folder))
    code = cli.main(["matrix", "verify", str(file)])
    num_refused = 0
    positions = range(0, len(whole), max(1, len(whole) // 500))
    for position in positions:
        file.write_bytes(_flipped(whole, position, 1 << position % 8))
        try:
            load_matrix(file)
        except MatrixError:
            num_refused += 1
    is_caught = "does not match its digest" in said and code == ExitCode.ENVIRONMENT and num_refused == len(positions)
    return is_caught, {
        "said": said[:300],
        "exit_code_of_verify": int(code),
        "bytes_flipped": len(positions),
        "refused": num_refused,
    }


def _flipped(content: bytes, where: int, bit: int) -> bytes:
    return content[:where] + bytes([content[where] ^ bit]) + content[where + 1 :]


@contextmanager
def upgraded(place: Place, policy: Policy) -> Iterator[Server]:
    """A server whose model went from head dim 64 to 320; grouped heads, and a window of 64 tokens."""
    folder = place.folder / f"wide-{policy.value}"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    changes = {"head_dim": 320, "model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 512}
    config |= changes | {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    port = free_port()
    flags = ["--model", str(folder), "--load-format", "dummy", "--on-unproven", policy.value, "--port", str(port)]
    flags += ["--kv-cache-tokens", "4096", "--max-num-seqs", "4", "--no-prefix-caching", "--served-model-name", "wide"]
    environ = dict(os.environ) | {"HALLMARK_CACHE_DIR": str(folder / "cache")}
    with running([*HALLMARK, "serve", *flags], port, place.folder / f"{policy.value}.log", environ) as server:
        yield server


def refused_upgrade(server: Server) -> Found:
    """Show that the server is never ready, names shape and limit, and answers requests with 503."""
    server.wait_for(lambda: "d320" in server.log, "the refusal in the log", 120)
    ready = server.get("/readyz")
    asked = server.post("/v1/completions", {"model": "wide", "prompt": "Once"})
    reasons = [reason for reason in ready.json()["reasons"] if "d320" in reason]
    is_caught = ready.status_code == asked.status_code == 503 and bool(reasons)
    is_caught &= all("takes at most 256, the shape has 320" in reason for reason in reasons)
    return is_caught, {"readyz": ready.status_code, "completions": asked.status_code, "said": reasons[0][:300]}


def degraded_upgrade(server: Server, place: Place) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Two items: the fallback that serves is named and counted; with it taken out, math is."""
    server.wait_ready()
    wanted = ("sdpa.efficient", "sdpa.math") if place.is_cuda else ("sdpa.math",)
    for path in wanted:
        yield f"head dim 320, grouped heads and a window under degrade: {path}", partial(_counted, server, path)
        if path != wanted[-1]:
            assert server.post("/attention/quarantine", {"path": path}).status_code == 200


def _counted(server: Server, path: str) -> Found:
    def counts() -> dict[str, float]:
        return {phase: server.value(FALLBACKS, to=path, phase=phase) for phase in ("prefill", "decode")}

    before = counts()
    asked = {"model": "wide", "prompt": list(range(10, 110)), "max_tokens": 4, "ignore_eos": True}
    answer = server.post("/v1/completions", asked)
    server.wait_for(lambda: counts()["decode"] - before["decode"] >= 3, "the fallbacks", 20)
    counted = {phase: count - before[phase] for phase, count in counts().items()}
    rows = server.plan()
    report = server.post("/attention/attest", {}).json()
    rows = [row for row in rows if row["head_dim"] is not None]
    is_caught = answer.status_code == 200 and {row["path"] for row in rows} == {path}
    is_caught &= all("head_dim" in row["fallback_reasons"] for row in rows)
    is_caught &= counted == {"prefill": 1, "decode": 3} and report["result"] == "match"
    return is_caught, {
        "counted": counted,
        "reasons": sorted({reason for row in rows for reason in row["fallback_reasons"]}),
        "kernels": {batch["phase"]: sorted(batch["kernels"]) for batch in report["batches"]},
        "attestation": report["result"],
        "attestation_said": [batch["detail"] for batch in report["batches"] if batch["detail"]],
    }
