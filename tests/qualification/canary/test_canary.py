"""The canary against scripted servers, over real HTTP: faults and delays are planted in the server."""

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from qualification.canary.command import add_arguments, run
from qualification.canary.golden import Golden, Times, load_golden, save_golden
from qualification.canary.record import places_of
from qualification.common.exit_code import ExitCode
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import load_matrices, save_matrix
from support.qualification_fakes import MACHINE, SHAPE, evidence, path
from support.scripted_server import COUNTERS, Script, plan_row, serving

# Two buckets, close together. A scripted server answers in 2 ms, on a busy machine in up to 50: that is noise
# here, and the delays that are planted are far beyond it.
FAST = ("--samples", "12", "--looks", "1", "--lengths", "96", "384", "--utilization", "5", "--max-slowdown", "2")
NOISE = ("--noise-ms", "60")
# Of a server that waits and computes nothing: requests may all meet, and a round takes as long as one.
AT_ONCE = ("--utilization", "50")


def usual(**changes: object) -> Script:
    return Script(**{"max_model_len": 700, "token_s": 0.001, **changes})  # type: ignore[arg-type]


@pytest.fixture
def script() -> Script:
    return usual()


def canary(url: str, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(["--url", url, *FAST, *NOISE, *flags]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A golden file of the usual script, without times, good for three days."""
    file = tmp_path_factory.mktemp("golden") / "golden.json"
    with serving(usual()) as url:
        less = ("--no-performance", "--valid-days", "3")
        assert canary(url, "record", "--out", str(file), *less) == ExitCode.PASS
    return file.read_bytes()


@pytest.fixture
def golden(recorded: bytes, tmp_path: Path) -> str:
    """Copy of the golden file that a test may spoil."""
    file = tmp_path / "golden.json"
    file.write_bytes(recorded)
    return str(file)


def lines_of(capsys: pytest.CaptureFixture[str], start: str = "") -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_server_against_itself_passes_every_stage(url: str, golden: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert canary(url, "--golden", golden, "--baseline", url) == 0
    lines = lines_of(capsys)
    assert [line.split(":")[0] for line in lines] == [
        "environment",
        "model",
        "plan",
        "numerics le_128",
        "numerics le_512",
        "numerics le_2k",
        "numerics mix",
        "performance le_128",
        "performance le_512",
        "service",
        "verdict",
    ]
    assert all("PASS" in line for line in lines)
    assert "1 proven by the matrix, 1 by the server itself" in lines[2]


def test_requests_of_the_trace_that_fail_exit_3(
    url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.error_event = True
    assert canary(url, "--golden", golden, "--baseline", url) == 3
    assert "24 requests of the trace failed on the candidate: the engine died" in capsys.readouterr().out


def test_weights_in_8_bits_may_be_others_where_that_is_said(
    golden: str, script: Script, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokenizers may not; and a server with no weight of few bits is no such candidate."""
    known = msgspec.structs.replace(
        load_golden(Path(golden)), model_digests={"tokenizer": "a" * 64, "weights": "b" * 64}
    )
    save_golden(Path(golden), known)
    flags = ("--golden", golden, "--no-performance")
    assert canary(url, *flags, "--quantized") == ExitCode.ENVIRONMENT
    assert "no weight of the server's plan has 8 or 4 bits" in capsys.readouterr().out
    script.rows.append(plan_row(shape="experts bf16 fp8_blocks e128:8 h2048 w768 silu r-le_16"))
    script.model_digests = {"tokenizer": "a" * 64, "weights": "c" * 64}
    assert canary(url, *flags) == ExitCode.ENVIRONMENT
    capsys.readouterr()
    assert canary(url, *flags, "--quantized") == ExitCode.PASS
    out = capsys.readouterr().out
    assert "weights are in fp8_blocks, and are not compared by their digest" in out
    assert "fp8_blocks beside answers of 16 bits, under limits of its own" in out
    assert "numerics mix: SKIPPED" in out or "SKIPPED: requests at once" in out
    script.model_digests = {"tokenizer": "d" * 64, "weights": "c" * 64}
    assert canary(url, *flags, "--quantized") == ExitCode.ENVIRONMENT
    assert canary(url, *flags, "--quantized", "--exact") == ExitCode.ENVIRONMENT


# --- what cannot be judged --------------------------------------------------------------------------------------------


def counters_but(name: str, **others: float) -> dict[str, float]:
    return {key: value for key, value in COUNTERS.items() if key != name} | others


def another_third(body: dict[str, Any], tokens: list[int]) -> list[int]:
    """The last of three answers is the first one."""
    is_last = body.get("n") == 3 and tokens[0] == body["prompt"][-20] + 2
    return [token - 2 for token in tokens] if is_last else tokens


def unpenalised(body: dict[str, Any], tokens: list[int]) -> list[int]:
    return tokens[:-1] if "frequency_penalty" in body else tokens


def one_salt_for_all(body: dict[str, Any], tokens: list[int]) -> list[int]:
    return tokens[1:] if body["cache_salt"].endswith("another") else tokens


BF16 = [plan_row(shape="prefill bf16 h4:2")]
REVIEWED = {"rows": [plan_row(status="proven")], "matrix_digest": "ab" * 32}
FELL_BACK = [plan_row(), plan_row(shape="s", path="sdpa.math", fallback_reasons=["head_dim"])]
FALLBACKS = 'hallmark_attention_fallback_total{reason="head_dim"}'
GOOD = [name for name in COUNTERS if '"ok"' in name or '"false"' in name]
RUNS = [
    ({"rows": BF16, "logprob_shift": lambda _: 0.01}, [], 0, ""),  # sixteen bits are given more room
    ({"rows": BF16, "logprob_shift": lambda _: 0.05}, [], 1, ""),
    ({"salt": 1}, [], 1, "le_128-5: differs from character 0 of"),
    pytest.param(
        {"chosen": another_third}, [], 1, "n = 3: answer 2 is another one", id="an answer of three is a clone"
    ),
    ({"chosen": unpenalised}, [], 1, "penalties: answer 0 is another one"),
    pytest.param(
        {"chosen": one_salt_for_all},
        [],
        1,
        "shared prefix, another salt: answer 0 is another one",
        id="one salt for all",
    ),
    pytest.param(
        {"num_special": 2}, [], 1, "chat: its prompt has 5 tokens, 3 were recorded", id="special tokens of a chat twice"
    ),
    ({"max_model_len": 650}, [], 3, "model: FAIL: the context is 650 tokens, 700 were recorded"),
    pytest.param(
        {"rows": FELL_BACK}, [], 3, "s: falls back from a to sdpa.math (head_dim)", id="another path than proven"
    ),
    ({}, ["--require-proven"], 3, ""),
    (REVIEWED, ["--matrix-digest", "abababab"], 0, ""),
    (REVIEWED, ["--matrix-digest", "cd" * 32], 3, "decided by matrix abababababab, reviewed is cdcdcdcdcdcd"),
    ({"model": "other"}, [], 3, "environment: FAIL: the server serves other, the golden file is of demo"),
    ({"rows": ["prefill"]}, [], 3, "environment: FAIL: /attention lists shapes that are no objects"),
    *[
        pytest.param({"counters_grow": name}, [], 0 if name in GOOD else 3, "", id=name.partition("{")[0])
        for name in COUNTERS
    ],
    ({"counters": counters_but("hallmark_nonfinite_logits_total")}, [], 4, ""),
    ({"counters": counters_but(FALLBACKS, hallmark_attention_fallback_total=0)}, [], 0, ""),  # without any label set
    ({"can_score": False}, [], 4, "gave no log probabilities of the prompt"),
    ({"status": 503}, [], 4, ""),
    *[({"raw": raw}, [], 4, "") for raw in (b"null", b"[" * 100_000, b'{"choices": [{"text": 5}]}', b"\xff")],
]


@pytest.mark.parametrize(("changes", "flags", "code", "said"), RUNS)
def test_a_run_against_a_changed_server_ends_with_its_code(
    golden: str, changes: dict[str, Any], flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(usual(**changes)) as url:
        assert canary(url, "--golden", golden, "--no-performance", *flags) == code
    assert said in capsys.readouterr().out


def test_a_server_that_is_not_there_exits_3_with_one_line(refused_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert canary(refused_url) == 3
    lines = lines_of(capsys)
    assert len(lines) == 2
    assert lines[0].startswith(f"environment: FAIL: {refused_url}/v1/models: ")


def test_a_baseline_that_is_not_there_exits_3(
    url: str, golden: str, refused_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canary(url, "--golden", golden, "--baseline", refused_url) == 3
    assert lines_of(capsys, f"environment: FAIL: {refused_url} names no model")


def test_without_golden_file_the_baseline_is_the_reference(
    url: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.model = "unheard-of"  # no golden file ships for it
    assert canary(url) == 4
    assert "no golden file for unheard-of: record one with `hallmark canary record`" in capsys.readouterr().out
    with serving(usual(model="unheard-of")) as baseline:
        assert canary(url, "--baseline", baseline, "--no-performance") == 0
        script.logprob_shift = lambda _: 0.1
        assert canary(url, "--baseline", baseline, "--no-performance") == 1


@pytest.mark.parametrize("name", ["tokenizer", "weights"])
def test_a_changed_tokenizer_or_changed_weights_are_named(
    url: str, script: Script, golden: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canary(url, "--golden", golden, "--no-performance") == 0
    assert "model: PASS: as recorded: tokenizer 777777777777, weights 333333333333" in lines_of(capsys)
    script.model_digests[name] = "5" * 64
    assert canary(url, "--golden", golden, "--no-performance") == 3
    (line,) = (line for line in lines_of(capsys) if line.startswith("model: "))
    assert line.startswith(f"model: FAIL: the {name} changed since ")
    script.model_digests[name] = None
    assert canary(url, "--golden", golden, "--no-performance") == 4


def test_a_golden_file_without_digests_is_still_compared(
    url: str, golden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_golden(Path(golden), msgspec.structs.replace(load_golden(Path(golden)), model_digests={}))
    assert canary(url, "--golden", golden, "--no-performance") == 0
    assert any(line.startswith("model: SKIPPED: the golden file of ") for line in lines_of(capsys))


def broken_prompt(known: Golden, **changes: object) -> Golden:
    first, *others = known.prompts
    return msgspec.structs.replace(known, prompts=[msgspec.structs.replace(first, **changes), *others])


PAST = (datetime.now(UTC) - timedelta(days=1)).isoformat()
UNREADABLE = {
    "truncated": lambda text: text[:-5],
    "deep": lambda _: b'{"schema": 2, "model": ' + b"[" * 100_000,
    "binary": lambda _: b"\xff\xfe\x00",
}
UNUSABLE = {
    "expired": lambda it: msgspec.structs.replace(it, expires_at=PAST),
    "older schema": lambda it: msgspec.structs.replace(it, schema=1),
    "time": lambda it: msgspec.structs.replace(it, times={"le_128": Times([0.0], [0.1])}),
    "lengths": lambda it: broken_prompt(it, logprobs=it.prompts[0].logprobs[:-1]),
    "place": lambda it: broken_prompt(it, places=[99] * len(it.prompts[0].places)),
}


@pytest.mark.parametrize("damage", [*UNREADABLE, *UNUSABLE, "folder"])
def test_unusable_golden_file_exits_3_with_one_line(
    url: str, golden: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(golden)
    if damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage in UNREADABLE:
        file.write_bytes(UNREADABLE[damage](file.read_bytes()))
    else:
        save_golden(file, UNUSABLE[damage](load_golden(file)))
    assert canary(url, "--golden", golden) == 3
    assert len(lines_of(capsys)) == 2


def test_server_without_tokens_of_a_text_cannot_be_recorded(
    url: str, tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.tokens = []
    assert canary(url, "record", "--out", str(tmp_path / "golden.json"), "--no-performance") == 3
    assert lines_of(capsys) == ["environment: FAIL: /tokenize returned no tokens"]


def test_times_are_compared_on_the_same_machine_only(
    url: str, tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "golden.json")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["record", "--url", url, "--out", file, *FAST])) == 0
    assert {bucket: len(it.ttft_s) for bucket, it in load_golden(Path(file)).times.items()} == {
        "le_128": 12,
        "le_512": 12,
    }
    assert canary(url, "--baseline", file) == 0
    script.first_token_s = lambda _: 0.25
    assert canary(url, "--baseline", file, *AT_ONCE) == 2
    script.fingerprint["gpu"] = "other"
    assert canary(url, "--baseline", file) == 4
    assert "the golden file was recorded on another fingerprint" in capsys.readouterr().out


def test_trace_longer_than_the_context_is_inconclusive(
    url: str, golden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canary(url, "--golden", golden, "--baseline", url, "--lengths", "690", "9000") == ExitCode.INCONCLUSIVE
    [line] = lines_of(capsys, "performance")
    assert line == "performance: NO DATA: of 690, 9000 tokens, with 16 to generate, none fits the context of 700"


def test_server_that_never_answers_exits_3_after_two(
    url: str, golden: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.hangs = True
    assert canary(url, "--golden", golden, "--timeout", "0.2") == 3
    said = "environment: FAIL: the server hangs: 2 golden prompts in a row /v1/completions: timed out"
    assert lines_of(capsys, "environment: FAIL") == [said]
    assert len(script.bodies) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-slowdown", "nan"], "--max-slowdown must be at least 1, got nan"),
        (["--max-slowdown", "inf"], "--max-slowdown must be at least 1, got inf"),
        (["--max-slowdown", "0.9"], "--max-slowdown must be at least 1, got 0.9"),
        (["--noise-ms", "nan"], "--noise-ms must not be negative, got nan"),
        (["--noise-ms", "-1"], "--noise-ms must not be negative, got -1"),
        (["--utilization", "0"], "--utilization must be positive, got 0"),
        (["--timeout", "nan"], "--timeout must be positive, got nan"),
        (["--lengths", "0"], "--lengths and --vocab-size must be at least 1"),
        (["record", "--valid-days", "0"], "--valid-days must be at least 1, got 0"),
        (["--valid-days", "3"], "--valid-days goes with record: a check asks the golden file"),
        (["--matrix-digest", ""], "--matrix-digest takes 8 to 64 hexadecimal digits"),
        (["--api-key-file", "/dev/null"], "/dev/null holds no key"),
    ],
)
def test_a_flag_with_which_nothing_could_fail_is_refused(
    flags: list[str], message: str, refused_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canary(refused_url, *flags) == 3
    assert capsys.readouterr().out == f"environment: FAIL: {message}\n"


def test_unwritable_place_is_refused_before_any_request(
    url: str, tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert canary(url, "record", "--out", str(tmp_path / "none" / "golden.json")) == 3
    assert canary(url, "record", "--out", "/proc/golden.json") == 3  # where root may write no more than others
    assert canary(url, "--out-dir", str(tmp_path / "file" / "out")) == 3
    assert script.bodies == []
    assert len(lines_of(capsys, "environment: FAIL")) == 3


def test_an_interrupt_decides_nothing_and_is_one_line(url: str, script: Script, golden: str) -> None:
    script.hangs = True
    # A shell's background jobs, as these tests may be, ignore the signal, and so would their children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; import sys; from qualification.canary import command as c; import argparse"
    code += "; p = argparse.ArgumentParser(); c.add_arguments(p); sys.exit(c.run(p.parse_args(sys.argv[1:])))"
    flags = ["--url", url, "--golden", golden, "--no-performance"]
    process = subprocess.Popen([sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not script.bodies and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INCONCLUSIVE
    assert out.decode().splitlines()[-1] == "interrupted: nothing was decided"
    assert b"Traceback" not in err


def test_matrix_of_another_digest_than_named_exits_3(
    url: str, golden: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_matrix(tmp_path / gpu_folder(MACHINE.gpu) / "a.json", [evidence(SHAPE, path("fast"))])
    digest = load_matrices(tmp_path, MACHINE).digest
    assert digest is not None
    script.fingerprint = asdict(MACHINE) | {"device": MACHINE.device.value}
    script.matrix_digest, script.rows = digest, [plan_row(shape=str(SHAPE), path="fast", status="proven")]
    flags = ("--golden", golden, "--no-performance", "--matrix", str(tmp_path), "--matrix-digest")
    assert canary(url, *flags, digest[:8]) == 0
    assert canary(url, *flags, "cd" * 32) == 3
    assert f"holds matrix {digest[:12]}, --matrix-digest names cdcdcdcdcdcd" in capsys.readouterr().out


# --- what is sent, and what is written --------------------------------------------------------------------------------


def test_prompts_are_asked_greedily_and_never_twice_for_time(url: str, golden: str, script: Script) -> None:
    canary(url, "--golden", golden, "--baseline", url)
    asked = [body for body in script.bodies if body.get("stream") or body.get("echo")]
    assert all(body["temperature"] == 0 for body in asked)
    # Not to the other side either, which is the same server here: its prefix cache would answer who comes second.
    timed = [tuple(body["prompt"]) for body in script.bodies if body.get("stream")]
    assert len(timed) == len(set(timed)) == 2 * 2 * (12 + 2)
    (salt,) = {body["cache_salt"] for body in asked if not body.get("stream")}
    script.bodies.clear()
    canary(url, "--golden", golden, "--no-performance")
    assert {salt} != {body["cache_salt"] for body in script.bodies}, "a cached prefix of an earlier run would be hit"


def test_a_mix_is_asked_at_once_and_under_two_salts(url: str, golden: str, script: Script) -> None:
    script.answer_s = 0.2
    assert canary(url, "--golden", golden, "--no-performance") == 0
    assert script.most_at_once == len(load_golden(Path(golden)).mix) == 9
    mixed = [body for body in script.bodies if body.get("n") or "messages" in body or body.get("logprobs") == 0]
    assert len(mixed) == 2 * 9
    assert len({body["cache_salt"] for body in mixed}) == 2


def test_golden_file_has_a_line_for_each_fitting_length(golden: str) -> None:
    recorded = load_golden(Path(golden))
    assert recorded.model == "demo"
    assert [len(prompt.token_ids) for prompt in recorded.prompts] == [5, 127, 129, 400, 600]
    assert [len(prompt.places) for prompt in recorded.prompts] == [4, 126, 128, 256, 256]
    assert len(Path(golden).read_text().splitlines()) >= 5 + len(recorded.prompts)
    assert recorded.expires_at is not None
    span = datetime.fromisoformat(recorded.expires_at) - datetime.fromisoformat(recorded.recorded_at)
    assert span == timedelta(days=3)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 257, 258, 3500])
def test_places_are_spread_over_the_prompt_with_its_last_token(num_tokens: int) -> None:
    places = places_of(num_tokens)
    assert places == sorted(set(places))
    assert all(1 <= place < num_tokens for place in places)
    assert not places or (places[0], places[-1]) == (1, num_tokens - 1)


@pytest.mark.parametrize("lines", ["secret\n", "# of the gateway\n\n  secret\nother\n"])
def test_the_first_key_of_a_servers_own_file_is_sent(url: str, script: Script, tmp_path: Path, lines: str) -> None:
    key = tmp_path / "key"
    key.write_text(lines)
    canary(url, "--api-key-file", str(key), "--no-performance")
    assert script.keys == {"Bearer secret"}


def test_json_markdown_junit_and_a_chart_are_written(url: str, golden: str, script: Script, tmp_path: Path) -> None:
    script.salt = 1
    folder = tmp_path / "out"
    assert canary(url, "--golden", golden, "--baseline", url, "--out-dir", str(folder)) == 1
    content = json.loads((folder / "canary.json").read_text())
    assert (content["exit_code"], content["verdict"]) == (1, "numerics")
    assert len(content["times"]["candidate"]["by_bucket"]["le_512"]["ttft_s"]) == 12
    suite = ElementTree.parse(folder / "canary.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("10", "4")
    # A loaded machine's times may show nothing.
    unknown = [it for it in content["verdicts"] if it["outcome"] == "no data"]
    assert suite.get("errors") == str(len(unknown))
    assert {it["stage"] for it in unknown} <= {"performance"}
    assert next(case.get("name") for case in suite if case.find("failure") is not None) == "numerics le_128"
    assert "| numerics | le_512 | fail |" in (folder / "canary.md").read_text()
    assert "candidate" in (folder / "canary.svg").read_text()
