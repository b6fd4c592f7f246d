"""The two error rates of the checker on this machine: right kernels that fail, wrong ones that pass.

Every path of the catalog that can run here, and every planted fault, is checked on inputs of many seeds and shapes. On
a CPU this is done by child processes under each instruction set and number of threads, since sums differ between them.
`python -m qualification.measure.error_rates START STOP STEP THREADS FAULTS LIMIT_S SETTING` is such a child: the
range of its seeds, its threads, whether it tries faults (0 or 1), its time and its name in the report. It prints its
counts as JSON.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from random import Random

import msgspec
import torch

from kernels.catalog import PATHS
from kernels.system.child_process import python_command
from kernels.system.device import read_fingerprint
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from qualification.common.table import table
from qualification.evidence.evidence import Check, strain
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.references import References
from qualification.measure.faults.attention_faults import Fault, can_show, wrong_kernel
from qualification.measure.inputs.attention_inputs import Case, cases
from qualification.measure.trials.failures import KERNEL_ERRORS

_HEADS = ((4, 2, 16), (2, 1, 64), (3, 1, 128), (8, 2, 80), (1, 1, 6))  # query heads, KV heads, head dim
_FLAGS: tuple[dict[str, object], ...] = (
    {},
    {"window": 48},
    {"softcap": 20.0},
    {"sinks": True},
    {"window": 48, "softcap": 20.0, "sinks": True, "mask": Mask.SPANS},
)
_INSTRUCTION_SETS = ("default", "avx2", "avx512")  # values of ATEN_CPU_CAPABILITY
_MKL = {"default": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
# The sizes of the two faults that have one, as shares of what must be caught.
_SHARES = (1.0, 0.5, 0.25, 0.0625, 0.0078125)
_SIZED = (Fault.ONE_ROW, Fault.SCALED)
# Pages in 32 bits show on far pages alone, and there as NaN: no limit decides.
_WITH_RATE = tuple(it for it in Fault if it not in (Fault.NONE, Fault.ONE_TILE, Fault.PAGES_IN_32_BITS))


class Rate(msgspec.Struct, kw_only=True):
    """Checks of one kind of kernel, right or wrong, on shapes of one dtype and phase."""

    setting: str  # e.g. "avx2, 2 threads"
    what: str  # a path's name, or a fault's
    share: float = 1.0  # of the fault's size
    dtype: str
    phase: str
    tried: int = 0  # checks of a right kernel; whole trials (all checks of all inputs of a shape) of a wrong one
    failed: int = 0
    raised: int = 0  # inputs that the path refused by an error: it serves nothing then, and is not wrong
    largest: float = 0.0  # a check as a share of its limit; of a fault the largest of the trial that failed it least
    where: str = ""  # of `largest`: check, case, shape and seed


@dataclass(frozen=True, slots=True)
class Setting:
    """The environment and threads of a child process."""

    name: str
    environment: dict[str, str]
    num_threads: int


def settings_here() -> tuple[Setting, ...]:
    """Return each instruction set that torch takes on this CPU, with one thread and with all cores."""
    num_threads = sorted({1, torch.get_num_threads()})
    found = []
    best = torch.backends.cpu.get_cpu_capability().lower()  # more than it would end a child by an illegal instruction
    taken = _INSTRUCTION_SETS[: _INSTRUCTION_SETS.index(best) + 1] if best in _INSTRUCTION_SETS else ("default",)
    for name, threads in product(taken, num_threads):
        environment = {"ATEN_CPU_CAPABILITY": name, **_MKL.get(name, {})}
        plural = "s" if threads > 1 else ""
        found.append(Setting(f"{name}, {threads} thread{plural}", environment, threads))
    return tuple(found)


def measure(
    seeds: range,
    shapes: Sequence[AttentionShape],
    *,
    device: torch.device,
    setting: str,
    has_faults: bool,
    limit_s: float = inf,
) -> list[Rate]:
    """Rates over these shapes, with faults or of right kernels only. Stops after `limit_s`, between two shapes."""
    rates: dict[tuple[str, float, str, str], Rate] = {}

    def rate(what: str, shape: AttentionShape, share: float = 1.0) -> Rate:
        key = (what, share, shape.dtype.value, shape.phase.value)
        if key not in rates:
            rates[key] = Rate(setting=setting, what=what, share=share, dtype=key[2], phase=key[3])
        return rates[key]

    started = time.monotonic()
    fingerprint = read_fingerprint(device)
    for seed in seeds:
        for shape in Random(seed).sample(shapes, len(shapes)):  # a run that is cut short has some of each
            if time.monotonic() - started > limit_s:
                return list(rates.values())
            inputs, references = list(cases(shape, device, seed=1000 * seed)), References()
            for path in PATHS:
                if path.run is not None and not path.rejects(shape, fingerprint):
                    _count_right(rate(path.name, shape), path.run, inputs, references, shape)
            if has_faults:
                for fault in (fault for fault in _WITH_RATE if can_show(fault, shape)):
                    for share in _SHARES if fault in _SIZED else (1.0,):
                        _count_wrong(rate(fault.name, shape, share), fault, share, inputs, references, shape)
    return list(rates.values())


def run_children(seeds: range, *, jobs: int, limit_s: float, say: Callable[[str], None]) -> list[Rate]:
    """Rates under every setting of this CPU, `jobs` children at a time. Raises RuntimeError for a child that fails.

    Faults are tried under the first setting only: what they change is more than its sums.
    """
    parts = [range(seeds.start + n, seeds.stop, jobs) for n in range(min(jobs, len(seeds)))]
    found: list[Rate] = []
    for index, setting in enumerate(settings_here()):
        has_faults = index == 0
        children = [_child(setting, part, has_faults, limit_s) for part in parts]
        outputs = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            raise RuntimeError(f"a child under {setting.name} failed: its error is above")
        for output in outputs:
            capability, rates = msgspec.json.decode(output, type=tuple[str, list[Rate]])
            if capability.lower() != setting.name.split(",")[0]:  # this CPU has not these instructions
                say(f"{setting.name}: torch computes by {capability} here, left out")
                break
            found = merged([*found, *rates])
        else:
            say(f"{setting.name}: done")
    return found


def merged(rates: Sequence[Rate]) -> list[Rate]:
    """One of each setting, kernel, size, dtype and phase."""
    found: dict[tuple[str, str, float, str, str], Rate] = {}
    for rate in rates:
        key = (rate.setting, rate.what, rate.share, rate.dtype, rate.phase)
        other = found.get(key)
        if other is None:
            found[key] = rate
            continue
        is_fault = rate.what in Fault.__members__
        kept = min((rate, other), key=_largest) if is_fault else max((rate, other), key=_largest)
        found[key] = Rate(
            setting=rate.setting, what=rate.what, share=rate.share, dtype=rate.dtype, phase=rate.phase,
            tried=rate.tried + other.tried, failed=rate.failed + other.failed, raised=rate.raised + other.raised,
            largest=kept.largest, where=kept.where,
        )  # fmt: skip
    return list(found.values())


def report(rates: Sequence[Rate]) -> list[str]:
    """Two tables: right kernels that failed, wrong ones that passed, over all settings."""
    right = [rate for rate in rates if rate.what not in Fault.__members__]
    wrong = [rate for rate in rates if rate.what in Fault.__members__]
    overall = merged([msgspec.structs.replace(rate, setting="") for rate in wrong])
    by_share: dict[tuple[str, str, float], list[Rate]] = {}
    for rate in overall:
        by_share.setdefault((rate.what, rate.dtype, rate.share), []).append(rate)
    rows = [
        (
            rate.setting,
            rate.what,
            rate.dtype,
            rate.phase,
            f"{rate.tried}",
            f"{rate.failed}",
            f"{rate.raised}",
            f"{rate.largest:.3f}",
        )
        for rate in sorted(right, key=lambda it: (it.setting, it.what, it.dtype, it.phase))
    ]
    faults = [
        (
            what, f"{share:g}", dtype, f"{sum(it.tried for it in found)}",
            f"{sum(it.tried - it.failed for it in found)}", f"{min(it.largest for it in found):.3g}",
        )
        for (what, dtype, share), found in sorted(by_share.items())
    ]  # fmt: skip
    num_checks, num_failed = sum(rate.tried for rate in right), sum(rate.failed for rate in right)
    return [
        *table(
            ("setting", "right kernel", "dtype", "phase", "checks", "failed", "raised", "largest of its limit"), rows
        ),
        f"{num_checks} checks of right kernels, {num_failed} failed",
        "",
        *table(("wrong kernel", "size", "dtype", "trials", "passed", "least of the limit"), faults),
    ]


def is_good(rates: Sequence[Rate]) -> bool:
    """No right kernel failed, and every fault of full size was caught each time."""
    return not any(
        rate.failed if rate.what not in Fault.__members__ else rate.share == 1.0 and rate.failed < rate.tried
        for rate in rates
    )


def _share(check: Check) -> float:
    """Return a check as a share of its limit; the largest float for a count above 0: JSON has no infinity."""
    return min(strain(check.measured, check.limit), sys.float_info.max)


def _largest(rate: Rate) -> float:
    return rate.largest


def _count_right(
    rate: Rate, run: RunAttention, inputs: Sequence[Case], references: References, shape: AttentionShape
) -> None:
    for case in inputs:
        try:
            found = check_path(run, [case], references)
        except KERNEL_ERRORS:
            rate.raised += 1
            continue
        for check in found:
            rate.tried += 1
            rate.failed += not check.is_passed
            size = _share(check)
            if size > rate.largest:
                rate.largest, rate.where = size, f"{check.name} of {check.case}, {shape}, seed {check.seed}"


def _count_wrong(
    rate: Rate, fault: Fault, share: float, inputs: Sequence[Case], references: References, shape: AttentionShape
) -> None:
    run = wrong_kernel(fault, share=share)
    checks: list[Check] = []
    for case in inputs:
        checks += check_path(run, [case], references)
        if fault not in _SIZED and any(not check.is_passed for check in checks):
            break  # for how much it is caught would take the other inputs
    worst = max(checks, key=_share)
    size = _share(worst)
    if not rate.tried or size < rate.largest:
        rate.largest, rate.where = size, f"{worst.name} of {worst.case}, {shape}, seed {worst.seed}"
    rate.tried += 1
    rate.failed += any(not check.is_passed for check in checks)


def trial_shapes_of(device: torch.device) -> Iterator[AttentionShape]:
    """Small shapes of every dtype, phase and kind of head, each with one of the flags in turn."""
    heads = _HEADS if device.type == "cpu" else ((4, 2, 64), (8, 1, 128), (6, 2, 256), (8, 2, 96), (8, 2, 80))
    kinds = product(Dtype, PLANNED_PHASES, range(len(heads)), range(len(_FLAGS)))
    for dtype, phase, head, flag in kinds:
        num_heads, num_kv_heads, head_dim = heads[head]
        bucket = Bucket.LE_512 if (head + flag) % 2 else Bucket.LE_128
        shape = AttentionShape(
            phase=phase,
            dtype=dtype,
            kv_dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            query_bucket=bucket if phase is Phase.PREFILL else Bucket.LE_128,
            context_bucket=bucket,
            page_size=None if phase is Phase.PREFILL else 16,
            window=None,
            softcap=None,
            sinks=False,
            mask=Mask.CAUSAL,
        )
        flags = _FLAGS[flag]
        if phase is Phase.DECODE:
            flags = {name: value for name, value in flags.items() if name != "mask"}
        yield replace(shape, **flags)  # type: ignore[arg-type]


def _child(setting: Setting, seeds: range, has_faults: bool, limit_s: float) -> "subprocess.Popen[bytes]":
    numbers = (seeds.start, seeds.stop, seeds.step, setting.num_threads, int(has_faults), limit_s)
    given = [f"{name}={value}" for name, value in setting.environment.items()]
    command = python_command("qualification.measure.error_rates", *map(str, numbers), setting.name, environment=given)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)


def _main(arguments: Sequence[str]) -> None:
    first, last, step, num_threads, has_faults = map(int, arguments[:5])
    torch.set_num_threads(num_threads)
    seeds, limit_s = range(first, last, step), float(arguments[5])
    cpu = torch.device("cpu")
    shapes = list(trial_shapes_of(cpu))
    rates = measure(seeds, shapes, device=cpu, setting=arguments[6], has_faults=bool(has_faults), limit_s=limit_s)
    sys.stdout.buffer.write(msgspec.json.encode((torch.backends.cpu.get_cpu_capability(), rates)))


if __name__ == "__main__":
    _main(sys.argv[1:])
