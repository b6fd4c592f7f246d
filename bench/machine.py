"""The machine of a bench: fingerprint and settings, the code's commit, and the rates of its floors."""

import argparse
import re
import shutil
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.shape import Dtype

if TYPE_CHECKING:
    import torch

    from qualification.measure.costs.ceilings import Ceilings

RESULTS = Path("hallmark-bench")  # the folder, in the current one, that a bench writes into without `--out-dir`
_H200_TFLOPS, _H200_TBS = 790.0, 4.2  # the best bf16 8192^3 product and device copy measured on one
_ROOT = Path(__file__).resolve().parents[1]


def add_ceiling_arguments(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """The flags that `ceilings_of` reads."""
    parser.add_argument("--measure-ceilings", action="store_true", help="by a matrix product and a copy, now")
    parser.add_argument("--peak-tflops", type=float, metavar="N", help="TFLOP/s of the floor (default on an H200: 790)")
    parser.add_argument("--peak-tbs", type=float, metavar="N", help="TB/s of the floor (default on an H200: 4.2)")


def ceilings_of(
    args: argparse.Namespace, device: "torch.device", dtype: Dtype, fingerprint: Fingerprint
) -> "Ceilings | None":
    """Measured, or from the flags and what is known of an H200 at two bytes a value; None where either is unknown."""
    from kernels.system.device import torch_dtype
    from qualification.measure.costs.ceilings import Ceilings, measure_ceilings

    if args.measure_ceilings:
        return measure_ceilings(device, torch_dtype(dtype))
    is_known = "H200" in fingerprint.gpu and dtype is not Dtype.FP32
    peak_tflops = args.peak_tflops or (_H200_TFLOPS if is_known else None)
    peak_tbs = args.peak_tbs or (_H200_TBS if is_known else None)
    return None if peak_tflops is None or peak_tbs is None else Ceilings(peak_tflops * 1e12, peak_tbs * 1e12)


def machine_of(fingerprint: Fingerprint, device: "torch.device") -> dict[str, str | int | float | None]:
    return {**fingerprint.values(), **gpu_settings(device)}


def gpu_settings(device: "torch.device") -> dict[str, str]:
    """Return power limit and clocks by nvidia-smi; empty on a CPU, without nvidia-smi, and where it fails."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return {}
    import torch

    names = ("power.limit", "clocks.max.sm", "clocks.max.mem")
    index = device.index if device.index is not None else torch.cuda.current_device()
    query = [program, f"--id={index}", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    return dict(zip(names, values, strict=True)) if answer.returncode == 0 and len(values) == len(names) else {}


def slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def commit_of_code() -> str | None:
    """The commit that this code is checked out at, with `-dirty` where a file differs; None outside of a checkout."""
    git = shutil.which("git")
    if git is None or not (_ROOT / ".git").exists():
        return None
    command = [git, "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip() or None


def head_of_cpu(command: str) -> dict[str, object]:
    """Return what the data of a run on this CPU begin with: when, by which command, at which commit, and where."""
    import torch

    from kernels.system.device import read_fingerprint

    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit_of_code(),
        "machine": asdict(read_fingerprint(torch.device("cpu"))) | {"device": "cpu"},
    }
