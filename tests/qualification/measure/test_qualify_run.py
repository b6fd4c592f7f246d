"""`hallmark qualify`: what it measures, what it keeps, and its exit codes. Measurements are fakes."""

import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from kernels.catalog import PATHS, path_named
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import flops_of
from kernels.vocabulary.path import KernelPath, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Phase
from qualification.common.exit_code import ExitCode
from qualification.common.progress import ProgressLine, duration
from qualification.decision.defaults import Choices
from qualification.decision.presets import PRESETS, preset_named
from qualification.evidence.choice import choice_of, is_left_to_fallback
from qualification.evidence.evidence import Evidence, Timing
from qualification.evidence.full_model import FullModel
from qualification.evidence.ledger import Target
from qualification.evidence.matrix import load_matrix, save_matrix
from qualification.evidence.verdicts import judge
from qualification.measure.campaign import Tools, conduct, default_file, shard_of_targets, targets_of
from qualification.measure.qualify import Bench, Pair, qualify
from qualification.measure.trials.failures import QualificationAborted
from qualification.measure.trials.trial import trial_of
from server.cli.main import main
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

FIRST, FALLBACK = path("triton.x"), path("sdpa.x", Tier.FALLBACK)
CATALOG = (FIRST, FALLBACK)
WRONG = {"checks": checks(2.0)}
RAISED = {"checks": (), "timing": None, "failure": "OutOfMemoryError: full"}
ALL = [(SHAPE, "triton.x"), (DECODE, "triton.x"), (SHAPE, "sdpa.x"), (DECODE, "sdpa.x")]
NEWER = (replace(FIRST, source_digest="newer"), FALLBACK)
FAILED = {"found": {"sdpa.x": RAISED}}


@dataclass
class Run:
    """One run with faked measurements: what each path is found to be, and after how many the run breaks off."""

    file: Path
    found: dict[str, dict[str, object]] = field(default_factory=dict)
    breaks_after: int | None = None
    breaks_with: BaseException = field(default_factory=KeyboardInterrupt)
    paths: Sequence[KernelPath] = CATALOG
    catalog: Sequence[KernelPath] = CATALOG
    machine: object = MACHINE
    seconds_each: float = 1.0
    asked: list[tuple[AttentionShape, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    now: float = 0.0

    def measure(self, pairs: Sequence[Pair], progress: ProgressLine, on_evidence: Callable[[Evidence], None]) -> None:
        for shape, kernel in pairs:
            if len(self.asked) == self.breaks_after:
                raise self.breaks_with
            progress(len(self.asked), len(pairs), kernel.name)
            self.asked.append((shape, kernel.name))
            self.now += self.seconds_each
            on_evidence(evidence(shape, kernel, **({"fingerprint": self.machine} | self.found.get(kernel.name, {}))))

    def __call__(
        self, *names: str, shapes: tuple[AttentionShape, ...] = (SHAPE, DECODE), **options: object
    ) -> ExitCode:
        targets = [Target(name, self.file.with_name(f"{name}.json"), shapes) for name in names or (self.file.stem,)]
        tools = Tools(
            catalog=self.catalog,
            paths=self.paths,
            fingerprint=self.machine,
            measure=self.measure,
            progress=ProgressLine(io.StringIO(), lambda: self.now, is_terminal=False),
            say=self.lines.append,
            clock=lambda: self.now,
        )
        return conduct(targets, tools, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gpu" / "demo.json"


def test_first_tier_is_measured_before_fallbacks(file: Path) -> None:
    run = Run(file)
    assert run() is ExitCode.PASS
    assert run.asked == ALL
    assert set(load_matrix(file).evidence) == set(ALL)


# What it shows: fields of the first run and of the second, options of the second, and what that measures.
SECOND_RUNS = {
    "nothing has changed": ({}, {}, {}, []),
    "a kernel has changed": ({}, {"catalog": NEWER, "paths": NEWER}, {}, ALL[:2]),
    "a kernel has changed, which alone is asked for": ({}, {"catalog": NEWER, "paths": NEWER[:1]}, {}, ALL[:2]),
    "another stack": ({}, {"machine": replace(MACHINE, torch="2.14.0")}, {}, ALL),
    "a failure stays": (FAILED, {}, {}, []),
    "a failure is asked for again": (FAILED, {}, {"is_retrying": True}, ALL[2:]),
    "an interrupted run": ({"breaks_after": 3}, {}, {}, ALL[3:]),
}


@pytest.mark.parametrize("name", SECOND_RUNS)
def test_a_second_run_measures_only_what_is_not_valid(file: Path, name: str) -> None:
    first, second, options, asked = SECOND_RUNS[name]
    Run(file, **first)()
    run = Run(file, **second)
    assert run(**options) is ExitCode.PASS
    assert run.asked == asked
    found = load_matrix(file).evidence
    assert set(found) == set(ALL)
    assert {entry.fingerprint for entry in found.values()} == {run.machine}
    assert any(f"{len(asked)} pairs to measure, " in line for line in run.lines)
    differs = "demo was measured on another stack (torch differ) and is measured anew"
    assert (differs in run.lines) == (run.machine != MACHINE)


def test_an_interrupted_run_keeps_what_it_has_measured(file: Path) -> None:
    run = Run(file, breaks_after=3)
    assert run() is ExitCode.INCONCLUSIVE
    assert set(load_matrix(file).evidence) == set(run.asked)
    assert any(line.startswith("interrupted: all that was measured is kept") for line in run.lines)


def test_time_limit_ends_the_run_after_a_pair(file: Path) -> None:
    run = Run(file)
    assert run(time_limit_s=1.5) is ExitCode.INCONCLUSIVE
    assert len(run.asked) == 2
    assert len(load_matrix(file).evidence) == 2


def test_models_with_the_same_shapes_share_a_measurement(file: Path) -> None:
    run = Run(file)
    assert run("a", "b") is ExitCode.PASS
    assert len(run.asked) == 4
    assert load_matrix(file.with_name("a.json")).evidence == load_matrix(file.with_name("b.json")).evidence


def test_what_one_models_file_proves_is_written_into_anothers(file: Path) -> None:
    Run(file)("a")
    run = Run(file)
    run("a", "b")
    assert run.asked == []
    assert len(load_matrix(file.with_name("b.json")).evidence) == 4


def test_broken_file_is_neither_used_nor_overwritten(file: Path) -> None:
    Run(file)()
    content = file.read_bytes()[:-5]
    file.write_bytes(content)
    run = Run(file)
    assert run() is ExitCode.ENVIRONMENT
    assert run.asked == []
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ({"triton.x": WRONG}, ExitCode.NUMERICS, "triton.x fails its checks"),
        ({"sdpa.x": WRONG}, ExitCode.PASS, "2 shapes, 4 measured: 2 proven, 2 failed"),
        ({"sdpa.x": RAISED}, ExitCode.PASS, "OutOfMemoryError: full"),
        ({"triton.x": RAISED}, ExitCode.ENVIRONMENT, "only the fallback sdpa.x serves it"),
        ({"triton.x": RAISED, "sdpa.x": RAISED}, ExitCode.ENVIRONMENT, "no path serves it"),
        ({"triton.x": RAISED, "sdpa.x": WRONG}, ExitCode.NUMERICS, "sdpa.x fails its checks"),
    ],
)
def test_the_exit_code_says_what_is_wrong(
    file: Path, found: dict[str, dict[str, object]], code: ExitCode, said: str
) -> None:
    run = Run(file, found=found)
    assert run() is code
    assert any(said in line for line in run.lines), run.lines
    assert run.lines[-1] == f"verdict: {code.name} (exit {code.value})"


def test_a_shape_that_every_path_rejects_has_no_kernel_path(file: Path) -> None:
    run = Run(file)
    assert run(shapes=(replace(SHAPE, head_dim=320),)) is ExitCode.ENVIRONMENT
    assert any("every path rejects it" in line for line in run.lines)


def test_a_run_of_fallbacks_alone_does_not_miss_the_first_tier(file: Path) -> None:
    assert Run(file, paths=(FALLBACK,))() is ExitCode.PASS


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QualificationAborted("it proves nothing"), ExitCode.INCONCLUSIVE),
        (DeviceLost("triton.x broke the device", [("triton.x", str(SHAPE))]), ExitCode.ENVIRONMENT),
    ],
)
def test_a_run_that_cannot_go_on_says_why(file: Path, error: Exception, code: ExitCode) -> None:
    run = Run(file, breaks_after=1, breaks_with=error)
    assert run() is code
    assert any(str(error) in line for line in run.lines)


class DeviceBreaker:
    """A path that leaves the device unusable; without a GPU there is no other way to such a device."""

    name, source_digest = "triton.x", "digest"

    @property
    def run(self) -> None:
        raise DeviceLost(f"{self.name} broke the device", [(self.name, str(SHAPE))])


def test_path_that_broke_the_device_is_recorded() -> None:
    found: list[Evidence] = []
    bench = Bench(MACHINE, torch.device("cpu"))
    pairs = [(SHAPE, DeviceBreaker()), (DECODE, FIRST)]
    with pytest.raises(DeviceLost):
        qualify(pairs, bench, progress=lambda *_: None, on_evidence=found.append, check_checker=lambda *_, **__: ())
    assert [(entry.path, entry.shape) for entry in found] == [("triton.x", SHAPE)]
    assert found[0].failure == "DeviceLost: triton.x broke the device"


def test_table_has_paths_by_time_and_marks_the_serving(file: Path) -> None:
    run = Run(file, found={"sdpa.x": {"timing": None} | WRONG})
    run()
    lines = [line.split() for line in run.lines if "triton.x" in line or "sdpa.x" in line]
    assert lines[0][:8] == ["prefill", "le_128", "le_128", "*", "triton.x", "proven", "10", "us"]
    assert lines[1][:3] == ["sdpa.x", "failed", "-"]
    assert lines[1][-4:] == ["2", "of", "0", "(ragged)"]


def test_several_models_get_a_line_each_instead_of_tables(file: Path) -> None:
    run = Run(file)
    run("a", "b")
    assert [line.split(":")[0] for line in run.lines if "4 proven" in line] == ["a", "b"]
    assert not any(line.startswith("phase") for line in run.lines)


def test_targets_are_shapes_of_asked_phases_and_paths() -> None:
    decoding = path("triton.decode", phases=frozenset({Phase.DECODE}))

    def shapes(phases: Sequence[Phase], paths: Sequence[KernelPath]) -> tuple[AttentionShape, ...]:
        models = {"demo": preset_named("demo").config}
        choices, names = Choices(max_model_len=300, dtype=Dtype.FP16), [phase.value for phase in phases]
        [target] = targets_of(models, choices, device_type="cuda", phases=names, paths=paths, file_of=Path)
        return target.shapes

    assert len(shapes(list(PLANNED_PHASES), CATALOG)) == 2 + 3 + 2
    assert {shape.phase for shape in shapes([Phase.PREFILL, Phase.DECODE], CATALOG)} == {Phase.PREFILL, Phase.DECODE}
    assert {(shape.phase, shape.dtype) for shape in shapes(list(PLANNED_PHASES), [decoding])} == {
        (Phase.DECODE, Dtype.FP16)
    }


def test_shards_hold_every_shape_once_and_about_as_much() -> None:
    paths = [path_named(name) for name in ("triton.prefill", "triton.extend", "triton.decode")]
    whole = targets_of(
        {preset.name: preset.config for preset in PRESETS},
        Choices(dtype=Dtype.BF16),
        device_type="cuda",
        phases=[phase.value for phase in PLANNED_PHASES],
        paths=paths,
        file_of=Path,
    )
    shapes = {shape for target in whole for shape in target.shapes}
    shards = [shard_of_targets(whole, index, 4, is_cpu=False) for index in range(4)]
    dealt = [{shape for target in shard for shape in target.shapes} for shard in shards]
    assert sum(map(len, dealt)) == len(shapes)
    assert set.union(*dealt) == shapes
    for target in whole:
        of_shards = [it.shapes for shard in shards for it in shard if it.name == target.name]
        assert sorted(map(str, itertools.chain(*of_shards))) == sorted(map(str, target.shapes))
    flops = [sum(flops_of(it, *trial_of(it).tested(it, is_cpu=False)) for it in shard) for shard in dealt]
    assert max(flops) < 1.2 * min(flops)  # attention over the largest image alone is a quarter of all
    assert max(map(len, dealt)) < 1.1 * min(map(len, dealt))


def test_a_target_without_shapes_in_a_shard_is_left_out() -> None:
    targets = [Target("a", Path("a.json"), (SHAPE,)), Target("b", Path("b.json"), (DECODE,))]
    shards = [shard_of_targets(targets, index, 2, is_cpu=True) for index in range(2)]
    assert sorted(target.name for shard in shards for target in shard) == ["a", "b"]
    assert all(target.shapes for shard in shards for target in shard)


def test_files_lie_where_a_server_with_that_matrix_looks() -> None:
    assert default_file(Path("m"), "NVIDIA H200", "demo") == Path("m/nvidia-h200/demo.json")


def test_without_times_a_matrix_chooses_in_the_catalogs_order() -> None:
    for phase in PLANNED_PHASES:
        left = [kernel for kernel in PATHS if phase in kernel.limits.phases and not kernel.is_for_order]
        # No rivals are those whose pages hold 8 bits, or values of another size than keys.
        left = [it for it in left if it.limits.kv_dtypes is None and it.limits.max_values is None]
        while left:
            chosen = choice_of(evidence(SHAPE, kernel, timing=None) for kernel in reversed(left))
            assert chosen.path == left.pop(0).name


def test_a_matrix_alone_chooses_as_a_server_does() -> None:
    cpu, math = path_named("sdpa.cpu"), path_named("sdpa.math")
    slow, fast = evidence(SHAPE, cpu, p50_us=50.0), evidence(SHAPE, math, p50_us=10.0)
    assert choice_of([slow, fast]) is fast
    assert not is_left_to_fallback(fast, [slow, fast])
    known = {(SHAPE, entry.path): entry for entry in (slow, fast)}
    assert judge([SHAPE], known, paths=(cpu, math), fingerprint=MACHINE) == []
    gpu = replace(MACHINE, device=Device.CUDA)
    assert choice_of([replace(slow, fingerprint=gpu), replace(fast, fingerprint=gpu)]).path == "sdpa.cpu"
    wrong = replace(slow, **WRONG)
    assert choice_of([wrong, fast]) is fast
    assert is_left_to_fallback(fast, [wrong, fast])
    doubted = replace(fast, timing=Timing(10.0, 0.3, 20))
    assert choice_of([slow, doubted]) is slow


def test_tier_and_proof_go_before_speed() -> None:
    fast, slow = evidence(SHAPE, FALLBACK, p50_us=1.0), evidence(SHAPE, FIRST, p50_us=9.0)
    assert choice_of([fast, slow]) is slow
    assert choice_of([fast, replace(slow, **WRONG)]) is fast
    assert choice_of([replace(fast, **RAISED)]) is None


def test_the_gravest_finding_comes_first() -> None:
    known = {(DECODE, "triton.x"): evidence(DECODE, FIRST, **WRONG)}
    found = judge([SHAPE, DECODE], known, paths=(FIRST,), fingerprint=MACHINE)
    assert [(finding.code, finding.shape) for finding in found] == [
        (ExitCode.NUMERICS, DECODE),
        (ExitCode.INCONCLUSIVE, SHAPE),
    ]


# --- progress ---------------------------------------------------------------------------------------------------------


def ticking(*seconds: float) -> Callable[[], float]:
    times: Iterator[float] = iter(seconds)
    return lambda: next(times)


def test_on_a_terminal_one_line_is_rewritten_with_an_estimate() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, ticking(0.0, 10.0, 40.0), is_terminal=True)
    for done in (0, 1, 4):
        line(done, 4, "next")
    line.close()
    shown = [part.rstrip() for part in stream.getvalue().split("\r")]
    assert shown == ["", "[0/4] estimating  next", "[1/4] about 30 s left  next", "[4/4] in 40 s  next"]


def test_without_a_terminal_a_line_comes_every_ten_seconds() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, ticking(0.0, 4.0, 11.0, 12.0, 13.0), is_terminal=False)
    for done in range(5):
        line(done, 4, "next")
    assert [text.split()[0] for text in stream.getvalue().splitlines()] == ["[0/4]", "[2/4]", "[4/4]"]


def test_durations_are_read_as_people_say_them() -> None:
    assert [duration(seconds) for seconds in (7.4, 59.4, 59.6, 125)] == ["7 s", "59 s", "1:00 min", "2:05 min"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_proves_a_folders_config_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(dict(preset_named("demo").config) | {"num_attention_heads": 2}))
    file = tmp_path / "tiny.json"
    command = ["qualify", "--model", str(model), "--max-model-len", "100", "--phases", "decode", "--quick"]
    command += ["--paths", "sdpa.math", "--out", str(file), "--commit", "abc"]
    assert main(command) == 0
    [entry] = load_matrix(file).evidence.values()
    assert (entry.is_proven, entry.path, entry.commit, entry.shape.phase) == (True, "sdpa.math", "abc", Phase.DECODE)
    printed = capsys.readouterr().out
    assert "[0/1] estimating  wrong kernels, which must be refused" in printed
    assert "tiny: 1 shapes, 1 measured: 1 proven" in printed
    assert main(command) == 0
    assert "0 pairs to measure, 1 already valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the arguments --model --preset --all-presets --error-rates is required"),
        (["--preset", "none"], "no preset is named 'none'; there are demo, "),
        (["--preset", "demo", "--paths", "none"], f"expected one of {PATHS[0].name}"),
        (["--all-presets", "--out", "x.json"], "--out takes one model"),
        (["--model", "/no/such"], "/no/such/config.json cannot be read: No such file"),
        (["--preset", "demo", "--page-size", "0"], "must be a whole number of at least 1, got 0"),
        (["--preset", "demo", "--page-size", "x"], "must be a whole number of at least 1, got x"),
        (["--preset", "demo", "--time-limit", "nan"], "must be positive, got nan"),
        *[
            (["--preset", "demo", "--shard", it], f"must be I/N with 1 <= I <= N, got {it}")
            for it in ("0/2", "3/2", "2")
        ],
    ],
)
def test_a_misused_command_is_one_line_and_exit_code_3(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["qualify", *argv]) == 3
    err = capsys.readouterr().err
    assert err.startswith("hallmark: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_that_takes_no_file_is_refused_before_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qualify", "--preset", "demo", "--out-dir", "/dev/null/here"]) == 3
    out, err = capsys.readouterr()
    assert "/dev/null/here" in err
    assert "to measure" not in out


def test_a_config_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    for content, message in (
        ("{", f"{file} is no JSON object: Input data was truncated"),
        ("[]", f"{file} is no JSON object: Expected `object`, got `array`"),
        ("[" * 100_000, f"{file} is no JSON object: "),
        ('{"hidden_size": 1}', "config.json: model_type None is not supported; `hallmark models` lists"),
    ):
        file.write_text(content)
        assert main(["qualify", "--model", str(tmp_path)]) == 3
        err = capsys.readouterr().err
        assert err.startswith(f"hallmark: {message}")
        assert err.count("\n") == 1


def test_evidence_of_another_file_is_kept_when_limits_shrink(file: Path) -> None:
    save_matrix(file, [evidence(DECODE, FIRST)])
    Run(file)(shapes=(SHAPE,))
    assert (DECODE, "triton.x") in load_matrix(file).evidence


def test_model_times_stay_when_kernels_are_measured(file: Path) -> None:
    Run(file)()
    model = FullModel("demo", "2026-11-21T00:00:00+00:00", 8, ())
    save_matrix(file, load_matrix(file).evidence.values(), model)
    again = Run(file, found={"triton.x": {"checks": checks(0.25)}})
    again(is_retrying=True, shapes=(replace(SHAPE, head_dim=32),))
    assert load_matrix(file).model == model


def test_a_path_whose_kernels_have_other_names_is_said(file: Path) -> None:
    named = replace(FIRST, kernel_names=("naive",))
    for seen, num_lines in (("aten::bmm",), 1), (("naive_attention", "aten::bmm"), 0), ((), 0):
        run = Run(file, found={"triton.x": {"kernels": seen}}, catalog=(named, FALLBACK), paths=(named, FALLBACK))
        assert run(is_retrying=True) is ExitCode.PASS
        assert sum("no name has one of naive; correct kernel_names" in line for line in run.lines) == num_lines
        file.unlink()
