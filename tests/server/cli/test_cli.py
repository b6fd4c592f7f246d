"""The program's face: flags, exit codes, what it prints."""

import argparse
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernels.catalog import ALL_PATHS, any_path_named
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import KernelPath, Limits, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Phase
from server.cli.bench import add_arguments, has_benches, run
from server.cli.console import Console, plan_table
from server.cli.doctor import diagnose
from server.cli.main import UNREAD_TIMEOUT_MS, bind, build_parser, main, resolve, url_of
from server.cli.parser import Parser, commands_of, options_of, parsed
from server.cli.peer_flags import OTHER_NAMES, WITHOUT_FLAG
from server.errors import ModelError, SettingsError
from server.protocol.messages import EngineProgress, EngineRefused, Heartbeat
from server.settings import Settings, Task
from support.telemetry import engine_records


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hallmark: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "code", "wanted"),
    [
        (["serve", "--port", "x"], 2, "--port: Expected `int`, got 'x'"),
        (["serve", "--prot", "1"], 2,
            "unrecognized arguments: --prot 1; did you mean --port? (see hallmark serve --help)"),
        (["serve", "--no-cuda-graph"], 2, "did you mean --no-cuda-graphs?"),
        (["serve", "--por", "1"], 2, "unrecognized arguments: --por 1"),  # no abbreviations: they break with new flags
        (["serve", "--block-size=32", "--trust-remote-code"], 2, "; --block-size is --page-size here; leave out "
            "--trust-remote-code: no code of a model's folder is ever run (see hallmark serve --help)"),
        (["serve", "/one", "--model", "/two"], 2, "two models are given, /one and --model /two: a server has one"),
        (["serve", "--served-model-name", "mine", "/no/such/folder"], 2, "or names with commas (mine,/no/such/folder)"),
        (["serve", "/no/such/folder", "--served-model-name", "a", "b"], 2, "model /no/such/folder: no such folder"),
        (["serve", "--served-model-name", "a,,b"], 2, "--served-model-name: Expected `str` matching regex"),
        (["serve", "--served-model-name", " "], 2, "--served-model-name: Expected `str` matching regex"),
        (["serve", "--lora-modules", "a=b"], 2, "leave out --lora-modules: adapters are not implemented"),
        (["serve", "--enable-expert-parallel"], 2, "leave out --enable-expert-parallel: every rank has columns"),
        (["serve", "--config", "/no/x.yaml"], 2, "--config /no/x.yaml cannot be read: No such file or directory"),
        (["serve", "--uvicorn-log-level", "info"], 2, "leave out --uvicorn-log-level: the log has one level"),
        (["serve", "/" + "a" * 300], 2, "a cannot be read: File name too long"),
        (["serve", "/no/such/folder"], 2, "model /no/such/folder: no such folder"),
        (["qualify", "--preset", "llama-3.1-8b", "--tp", "2"], 3, "--tp is --tensor-parallel-size here"),
        (["serve", "--device", "tpu"], 2, "--device: Expected one of auto, cuda, cpu, got 'tpu'"),
        (["serve", "--model", "/no/such/folder"], 2, "/no/such/folder"),
        (["sreve"], 2, "did you mean serve?"),
        (["canary"], 3, "--url"),  # 2 would be a slow server
        (["bench", "serve", "--url", "x", "--out-dri", "y"], 3,
            "did you mean --out-dir? (see hallmark bench serve --help)"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_line_with_its_exit_code(
    argv: list[str], code: int, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    assert wanted in one_line(capsys)


def test_the_program_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert out == build_parser().format_help()


def every_command(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for inner in commands_of(parser).values():
        yield inner
        yield from every_command(inner)


@pytest.mark.parametrize("command", list(every_command(build_parser())), ids=lambda command: command.prog)
def test_a_help_has_a_sentence_examples_and_groups(command: argparse.ArgumentParser) -> None:
    assert (command.description or "").endswith(".")
    head, *examples = (command.epilog or "").splitlines()
    assert head in {"example:", "examples:"}
    assert examples
    for example in examples:
        program, *argv = shlex.split(example)
        assert program == "hallmark"
        assert example.strip().startswith(command.prog)
        parsed(build_parser(), argv)
    _, _, listed = command.format_help().partition("\noptions:\n")
    ungrouped = re.findall(r"^  (--?\w\S*)", listed.partition("\n\n")[0], re.MULTILINE)
    assert "-h," in ungrouped
    assert len(ungrouped) <= 1 + 6, "many flags are read in groups"


def test_a_missing_key_file_stops_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", "--model", str(tmp_path), "--api-key-file", str(tmp_path / "none")]) == 2
    assert one_line(capsys).endswith("none cannot be read: No such file or directory\n")


def test_a_reader_who_leaves_gets_no_complaint_and_no_pass() -> None:
    code = "import sys, server.cli.main as it; it._VERDICTS['report'] = lambda _: print('x' * 99_999) or 0; "
    program = [sys.executable, "-c", code + "sys.exit(it.main(['report']))"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert (command.stderr.read(), command.wait(30)) == (b"", 4)


def test_an_interrupted_command_gives_no_traceback_and_no_pass() -> None:
    code = """
import os, signal, sys, server.cli.main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it with the signal ignored
server.cli.main._VERDICTS["report"] = lambda _: os.kill(os.getpid(), signal.SIGINT)
sys.exit(server.cli.main.main(["report"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (4, b"")


def test_every_setting_has_a_flag_with_a_description() -> None:
    actions = {action.dest: action for action in serve_parser_actions()}
    for field in msgspec.structs.fields(Settings):
        action = actions[field.name]
        name = field.name.replace("_", "-")
        switch = ["--no-" + name] if isinstance(field.default, bool) else []
        assert action.option_strings == ["--" + name, *switch]
        assert action.help
        assert not action.help.startswith(" (")


def test_flags_of_other_servers_lead_to_flags_that_exist() -> None:
    known = {flag for action in serve_parser_actions() for flag in action.option_strings}
    assert set(OTHER_NAMES.values()) <= known
    assert not (OTHER_NAMES.keys() | WITHOUT_FLAG.keys()) & known
    assert not OTHER_NAMES.keys() & WITHOUT_FLAG.keys()


def serve_parser_actions() -> Iterator[argparse.Action]:
    yield from options_of(commands_of(build_parser())["serve"])


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--port {port} on 127.0.0.1 cannot be bound: "):
            bind("127.0.0.1", port, "--port")


def test_the_two_ports_of_a_server_cannot_be_one() -> None:
    with bind("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--admin-port {port} on 127.0.0.1 cannot be bound: "):
            bind("127.0.0.1", port, "--admin-port")


def test_port_0_takes_a_free_one_and_says_which() -> None:
    with bind("127.0.0.1", 0, "--port") as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert sock.getsockname()[1] > 0


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_peer_that_takes_no_bytes_is_given_up() -> None:
    with bind("127.0.0.1", 0, "--port") as sock, socket.create_connection(sock.getsockname()):
        connection, _ = sock.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNREAD_TIMEOUT_MS


def test_a_folder_is_taken_as_it_is_and_must_exist(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = Settings(model=str(tmp_path))
    assert resolve(settings) == (settings, tmp_path)
    with pytest.raises(ModelError, match="/no/such"):
        resolve(Settings(model="/no/such"))
    with pytest.raises(SettingsError, match="--matrix /no/such: no such folder"):
        resolve(Settings(model=str(tmp_path), matrix="/no/such"))


def test_a_full_disk_takes_lines_and_not_the_server_which_does_without_torch() -> None:
    code = "import os, sys, server.cli.main as it; [it._print(line) for line in 'ab']; "
    code += "os._exit(7 + ('torch' in sys.modules))"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (7, b"")


ROW = msgspec.structs.replace(engine_records.ROW, context_bucket="le_128")
READY = msgspec.structs.replace(engine_records.READY, plan=[ROW])


class Recorder:
    """A listener that remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        assert name.startswith("on_")
        return lambda *told: self.told.extend(told)


def test_at_ready_plan_address_and_a_command_are_printed() -> None:
    lines: list[str] = []
    recorder = Recorder()
    times = iter([10.0, 11.25])
    console = Console(recorder, model="m", url="http://127.0.0.1:1", print_line=lines.append, clock=lambda: next(times))
    console.on_ready(READY)
    assert recorder.told == [READY]
    assert "prefill  le_128  le_128   sdpa.math  provisional  from sdpa.cpu: head_dim" in lines
    assert "Hallmark is ready on http://127.0.0.1:1 with m, after 1.2 s" in lines
    assert lines[-1].startswith("  curl -N http://127.0.0.1:1/v1/completions ")


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_kv_cache_below_the_models_limit_is_reported(is_bound: bool) -> None:
    lines: list[str] = []
    ready = msgspec.structs.replace(READY, is_bound_by_cache=is_bound)
    Console(Recorder(), model="m", url="", print_line=lines.append).on_ready(ready)
    assert ("A request may have 300 tokens: the KV cache holds no more." in lines) == is_bound


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"task": Task.EMBED}, "  curl http://here/v1/embeddings "),
        ({"task": Task.SCORE}, "  curl http://here/v1/rerank "),
        ({"needs_key": True}, " -H 'Authorization: Bearer KEY' "),
    ],
)
def test_the_command_is_one_that_the_server_answers(options: dict[str, Any], command: str) -> None:
    lines: list[str] = []
    Console(Recorder(), model="m", url="http://here", print_line=lines.append, **options).on_ready(READY)
    assert command in lines[-1]


def test_a_refusal_is_printed_with_its_plan_unless_it_is_final() -> None:
    lines: list[str] = []
    recorder = Recorder()
    console = Console(recorder, model="m", url="http://here", print_line=lines.append)
    console.on_refused(EngineRefused("unproven", "1 of 1 shapes", [msgspec.structs.replace(ROW, path=None)]))
    assert "none" in lines[2].split()
    assert lines[-2] == "Hallmark refuses to serve: 1 of 1 shapes"
    assert lines[-1] == "Until it is ended, http://here/readyz answers 503 with the reason."
    lines.clear()
    console.on_refused(EngineRefused("unproven", "no", []))
    assert lines[0] == "Hallmark refuses to serve: no"
    lines.clear()
    final = EngineRefused("invalid_model", "no such file", [], is_final=True)
    console.on_refused(final)
    assert (recorder.told[-1], lines) == (final, [])  # the program's last line says it


def test_a_changed_plan_is_printed_as_its_fallbacks() -> None:
    lines: list[str] = []
    console = Console(Recorder(), model="m", url="", print_line=lines.append)
    console.on_plan([ROW, msgspec.structs.replace(ROW, fallback_reasons=[])])
    assert lines[0] == "The plan has changed: 1 of 2 shapes fall back"
    assert len(lines) == 4  # a head of two lines, and the one
    lines.clear()
    console.on_plan([msgspec.structs.replace(ROW, fallback_reasons=[])])
    assert lines == ["The plan has changed: 0 of 1 shapes fall back"]


def test_everything_else_is_passed_on() -> None:
    recorder = Recorder()
    console = Console(recorder, model="m", url="", print_line=lambda _: None)
    beat = Heartbeat(1, 0.0, 0, 0)
    console.on_heartbeat(beat)
    console.on_progress(EngineProgress("loading", "m"))
    console.on_death("killed")
    assert recorder.told == [beat, EngineProgress("loading", "m"), "killed"]


def test_a_plan_without_fallbacks_has_an_empty_column_or_notes() -> None:
    [_, _, line] = plan_table([msgspec.structs.replace(ROW, path="sdpa.cpu", fallback_reasons=[])])
    assert line == "prefill  le_128  le_128   sdpa.cpu  provisional"
    note = "sdpa.math takes 10 us, sdpa.cpu 34 us: the faster serves"
    [_, _, line] = plan_table([msgspec.structs.replace(ROW, fallback_reasons=[], notes=(note,))])
    assert line.endswith(f"sdpa.math  provisional  {note}")


def test_products_that_are_served_alike_share_a_line() -> None:
    product = msgspec.structs.replace(ROW, phase="linear", head_dim=None, path="torch.linear", fallback_reasons=[])
    unproven = msgspec.structs.replace(product, status="unproven")
    lines = plan_table([ROW, product, product, unproven])[2:]
    assert [line.split()[:3] for line in lines[1:]] == [["linear", "2", "shapes"], ["linear", "1", "shape"]]
    assert lines[1].split()[3:] == ["torch.linear", "provisional"]
    assert lines[2].split()[3:] == ["torch.linear", "unproven"]


def test_the_doctor_says_what_can_run_here_and_why_not() -> None:
    machine = Fingerprint(Device.CPU, "a processor", None, None, None, None, "2.13.0", None)
    gpu_only = Limits(frozenset({Device.CUDA}), frozenset({Phase.DECODE}), frozenset({Dtype.BF16}), 256)
    anywhere = Limits(frozenset(Device), frozenset(PLANNED_PHASES), frozenset({Dtype.FP32, Dtype.BF16}), 320)
    paths = [
        KernelPath("fast", Tier.FIRST, gpu_only, "", ("fast",), None),
        KernelPath("slow", Tier.FALLBACK, anywhere, "", ("slow",), None),
        any_path_named("torch.linear"),
    ]
    diagnosis = diagnose(machine, paths)
    lines = diagnosis.lines
    assert "gpu      a processor" in lines
    [fast] = [line for line in lines if line.startswith("fast")]
    [slow] = [line for line in lines if line.startswith("slow")]
    assert fast.endswith("  no (arch: runs on cuda, this machine is cpu)")  # that it takes no fp32 is beside the point
    assert slow.endswith("prefill extend decode  yes, in fp32, bf16")
    assert diagnosis.can_serve
    assert lines[-1] == (
        "Verdict: a server can run here, on 2 of 3 kernel paths (1 wanted, 1 fallback). "
        "It will be slow: prefill and extend and decode fall back."
    )


@pytest.mark.parametrize(
    "machine",
    [
        Fingerprint(Device.CPU, "a processor", None, None, None, None, "2.13.0", None),
        Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580", "13.0", "91900", "2.11.0+cu130", "3.6.0"),
    ],
    ids=lambda it: it.device.value,
)
def test_the_doctor_asks_each_path_for_what_it_can(machine: Fingerprint) -> None:
    lines = diagnose(machine, ALL_PATHS).lines
    for path in ALL_PATHS:
        [line] = [it for it in lines if it.startswith(f"{path.name} ")]
        assert ("  yes, in " in line) == (machine.device in path.limits.devices), line


def test_the_doctor_ends_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Verdict: a server can run here, on ")


def test_the_doctor_says_where_no_server_can_run() -> None:
    machine = Fingerprint(Device.CPU, "a processor", None, None, None, None, "2.13.0", None)
    prefill_only = Limits(frozenset({Device.CPU}), frozenset({Phase.PREFILL}), frozenset({Dtype.FP32}), 256)
    diagnosis = diagnose(machine, [KernelPath("one", Tier.FIRST, prefill_only, "", ("one",), None)])
    assert not diagnosis.can_serve
    assert diagnosis.lines[-1] == "Verdict: no server can run here: nothing computes extend and decode and linear."


def test_progress_is_a_line_at_each_stage_and_every_2_s() -> None:
    lines: list[str] = []
    times = iter([0.0, 0.0, 0.1, 1.9, 2.0, 2.1])
    console = Console(Recorder(), model="m", url="", print_line=lines.append, clock=lambda: next(times))
    for stage, detail in (("loading", "a"), ("proving", "1"), ("proving", "2"), ("proving", "3"), ("proving", "4")):
        console.on_progress(EngineProgress(stage, detail))
    assert lines == ["loading: a", "proving: 1", "proving: 4"]


def test_a_start_is_never_silent_for_10_s() -> None:
    lines: list[str] = []
    now = 0.0
    console = Console(Recorder(), model="m", url="", print_line=lines.append, clock=lambda: now)
    printed_at = [0.0]
    for now in map(float, range(1, 60)):
        if now == 20:
            console.on_progress(EngineProgress("proving", "0/87 (estimating)"))
        before = len(lines)
        console.on_waiting()
        printed_at += [now] if len(lines) > before or now == 20 else []
    assert max(later - earlier for earlier, later in pairwise(printed_at)) <= 8
    assert lines[0] == "starting: the engine process loads PyTorch, for 1 s"
    assert lines[3:5] == ["proving: 0/87 (estimating)", "proving: 0/87 (estimating), for 8 s"]


def test_after_a_death_the_wait_is_counted_anew() -> None:
    lines: list[str] = []
    times = iter([0.0, 100.0, 103.0])
    console = Console(Recorder(), model="m", url="u", print_line=lines.append, clock=lambda: next(times))
    console.on_death("killed")
    console.on_ready(READY)
    assert "Hallmark is ready on u with m, after 3.0 s" in lines


@pytest.mark.parametrize(("flag", "text"), [("--cuda-graphs", "true"), ("--no-cuda-graphs", "false")])
def test_a_switch_takes_no_value(flag: str, text: str) -> None:
    assert build_parser().parse_args(["serve", flag]).cuda_graphs == text


@pytest.mark.parametrize("has_other", [False, True])
def test_a_bench_of_the_installed_package_is_refused(has_other: bool, tmp_path: Path) -> None:
    if has_other:  # a package of this name that is not ours
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench" / "command.py").write_text("raise SystemExit")
    parser = Parser(prog="hallmark bench")
    add_arguments(parser, tmp_path)
    with pytest.raises(SettingsError, match="clone the repository"):
        run(parser.parse_args(["attention", "--quick"]), {})


def test_a_checkout_has_every_bench() -> None:
    assert has_benches()
    parser = Parser(prog="hallmark bench")
    add_arguments(parser)
    assert {parser.parse_args([name]).bench for name in ("attention", "steps")} == {"attention", "steps"}
