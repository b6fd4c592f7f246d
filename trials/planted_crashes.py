"""Faults in service, planted: a kernel that cannot be launched, and one that writes where nothing is.

The engine of a real server loads `sitecustomize.py` of a folder of ours, which gives the paths of prefill a fuse: the
next call breaks once there is a file named `fuse`, and only that call.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planted_kernels import Found, Place
from planted_servers import FALLBACKS, HALLMARK, MAX_LEN
from running_server import ROOT, Server, free_port, running

_SITE = """
import sys

if "server.engine.process" in sys.orig_argv:
    from dataclasses import replace
    from pathlib import Path

    from kernels import catalog
    from kernels.vocabulary.shape import Phase

    FUSE = Path(__file__).with_name("fuse")

    def fused(run):
        def call(q, k, v, batch, flags, out):
            if FUSE.exists():
                how = FUSE.read_text()
                FUSE.unlink()
                import stray
                getattr(stray, how)(q)
            run(q, k, v, batch, flags, out)
        return call

    catalog.PATHS = tuple(
        replace(path, run=fused(path.run)) if path.run is not None and Phase.PREFILL in path.limits.phases else path
        for path in catalog.PATHS
    )
"""
_STRAY = """
import torch

try:
    import triton
    import triton.language as tl

    @triton.jit
    def stray_store(out_ptr):
        tl.store(out_ptr + (1 << 40), 1.0)
except ImportError:
    pass


def launch(q):
    raise torch.OutOfMemoryError("planted: no room for this kernel")


def access(q):
    if not q.is_cuda:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered (planted)")
    stray_store[(1,)](torch.zeros(1, device=q.device))
"""


@contextmanager
def fused(place: Place) -> Iterator[tuple[Server, Path]]:
    """(a server of the bundled model under `refuse`, the folder of its fuse); not ready yet."""
    folder = place.folder / "fused"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "stray.py").write_text(_STRAY)
    port = free_port()
    flags = ["--max-model-len", str(MAX_LEN), "--kv-cache-tokens", "4096", "--max-num-seqs", "4"]
    flags += ["--no-cuda-graphs", "--no-prefix-caching", "--on-unproven", "refuse", "--matrix", str(place.matrices)]
    known = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
    environ = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(folder), *known]),
        "HALLMARK_CACHE_DIR": str(folder / "cache"),
    }
    with running(
        [*HALLMARK, "serve", "--port", str(port), *flags], port, place.folder / "fused.log", environ
    ) as server:
        yield server, folder


def _quarantined(folder: Path) -> list[tuple[str, str, str]]:
    """(path, shape, why) on disk."""
    entries = [entry for file in (folder / "cache").glob("quarantine-*.json") for entry in json.loads(file.read_text())]
    return [(entry["path"], entry["shape"], entry["why"]) for entry in entries]


def _ask(server: Server, num_tokens: int) -> int:
    body = {"model": "demo", "prompt": list(range(10, 10 + num_tokens)), "max_tokens": 2, "ignore_eos": True}
    return server.post("/v1/completions", body).status_code


def failed_launch(server: Server, folder: Path) -> Found:
    """The request is answered by the next path; the pair is out of service, counted and on disk."""
    server.wait_ready()
    before = [_ask(server, 20), server.value(FALLBACKS)]
    (folder / "fuse").write_text("launch")
    status = _ask(server, 20)
    server.wait_for(lambda: server.value(FALLBACKS, reason="quarantined", phase="prefill") >= 1, "the fallback", 20)
    on_disk = _quarantined(folder)
    is_caught = before == [200, 0] and status == 200 and len(on_disk) == 1 and _ask(server, 20) == 200
    is_caught &= server.value("hallmark_engine_restarts_total") == 0
    return is_caught, {"answer": status, "quarantined": on_disk, **_serving(server, on_disk)}


def illegal_access(server: Server, folder: Path) -> Found:
    """The engine ends and is started again without the path; on the other shape of prefill."""
    already = _quarantined(folder)
    first = server.engine_pid()
    before, counted = _ask(server, 200), server.value(FALLBACKS, reason="quarantined", phase="prefill")
    (folder / "fuse").write_text("access")
    status = _ask(server, 200)
    server.wait_for(lambda: server.value("hallmark_engine_restarts_total", cause="device") == 1, "the engine's end", 60)
    server.wait_ready()
    on_disk = [entry for entry in _quarantined(folder) if entry not in already]
    after = _ask(server, 200)
    server.wait_for(
        lambda: server.value(FALLBACKS, reason="quarantined", phase="prefill") > counted, "the fallback", 20
    )
    is_caught = before == after == 200 and status >= 500 and server.engine_pid() != first and bool(on_disk)
    return is_caught, {"answer": status, "afterwards": after, "quarantined": on_disk, **_serving(server, on_disk)}


def _serving(server: Server, on_disk: list[tuple[str, str, str]]) -> dict[str, object]:
    """Return what serves the shapes now."""
    shapes = {shape for _, shape, _ in on_disk}
    rows = [row for row in server.plan() if row["shape"] in shapes]
    return {"serves_now": {row["shape"]: [row["path"], row["fallback_reasons"]] for row in rows}}
