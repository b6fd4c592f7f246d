"""Quarantines over a restart: a path that broke stays out until its source changes."""

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.catalog import PATHS
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.shape import Dtype, Phase
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import blaming
from server.engine.proof.quarantine import Quarantine
from server.engine.startup.builder import build_engine
from server.engine.startup.limits import EngineLimits
from server.engine.startup.plan import cache_folder
from server.engine.startup.warmup import warm_up
from server.errors import SettingsError
from server.protocol.messages import (
    AttestationReport,
    EngineFailed,
    FromEngine,
    Heartbeat,
    ShadowReport,
    StepOutput,
    StepRecord,
)
from server.settings import Settings
from support.engine import llama_engine
from support.engine.built_engine import built_engine
from support.models.tiny_llama import TinyLlama

PAIR = ("triton.decode", "decode bf16 h32:8 d128 q-le_128 c-le_2k causal page64")
RECORD = StepRecord(1, 0.0, 0.0, [], 0, 0, 0, 0, 1, 0, 0, 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "quarantine.json"


def test_servers_that_write_at_the_same_moment_lose_nothing(file: Path) -> None:
    names = [path.name for path in PATHS[:4]]
    turn = threading.Barrier(len(names), timeout=30)

    def serve(name: str) -> None:
        subject = Quarantine(file, PATHS)
        for n in range(3):
            turn.wait()
            subject.add([(name, f"shape {n}")], "it could not be launched")

    threads = [threading.Thread(target=serve, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Quarantine(file, PATHS).pairs == {(name, f"shape {n}") for name in names for n in range(3)}
    assert [each.name for each in file.parent.glob("*.json")] == [file.name]


def test_servers_of_two_versions_keep_what_broke_in_each(file: Path) -> None:
    newer = [replace(path, source_digest="newer") for path in PATHS]
    older_server = Quarantine(file, PATHS)
    older_server.add([PAIR], "it could not be launched")
    assert Quarantine(file, newer).pairs == frozenset()  # a kernel whose source has changed gets another chance
    Quarantine(file, newer).add([PAIR], "it could not be launched")
    older_server.add([("triton.prefill", PAIR[1])], "it could not be launched")
    assert Quarantine(file, newer).pairs == {PAIR}
    assert Quarantine(file, PATHS).pairs == {PAIR, ("triton.prefill", PAIR[1])}


def test_an_unreadable_folder_stops_the_start(tmp_path: Path) -> None:
    """Too long a name is as good as a missing permission, which root does not miss."""
    with pytest.raises(SettingsError, match="cannot be used: File name too long"):
        cache_folder(Settings(cache_dir=str(tmp_path / ("x" * 300))))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    subject = Quarantine(folder / "quarantine.json", PATHS)
    caplog.clear()
    subject.add([PAIR], "it could not be launched")
    assert caplog.messages == [f"what broke cannot be kept for the next start in {folder}: Not a directory"]


@pytest.mark.parametrize(
    "message",
    [
        StepOutput(RECORD, []),
        Heartbeat(1, 0.0, 0, 0),
        AttestationReport("timer", "match", 0.0, 0.0, [], []),
        ShadowReport("mismatch", 0.0, "decode", PAIR[0], 0, 0, 0, 1, 2.0, "off", 0.1, []),
    ],
)
def test_messages_of_a_sound_engine_write_nothing(file: Path, message: FromEngine) -> None:
    sent: list[FromEngine] = []
    Quarantine(file, PATHS).keeping(sent.append)(message)
    assert sent == [message]
    assert not file.exists()


@pytest.mark.parametrize(
    "message",
    [
        StepOutput(
            StepRecord(1, 0.0, 0.0, [], 0, 0, 0, 0, 1, 0, 0, 0, quarantined=[PAIR]),
            [],
        ),
        AttestationReport("timer", "mismatch", 0.0, 0.0, [], [PAIR]),
        ShadowReport("mismatch", 0.0, "decode", PAIR[0], 0, 0, 0, 1, 2.0, "off", 0.1, [PAIR]),
        EngineFailed("illegal memory access", [PAIR]),
    ],
)
def test_what_a_message_reports_is_on_disk_before_it_is_sent(file: Path, message: FromEngine) -> None:
    known: list[frozenset[tuple[str, str]]] = []
    Quarantine(file, PATHS).keeping(lambda _: known.append(Quarantine(file, PATHS).pairs))(message)
    assert known == [{PAIR}]


def test_a_file_that_cannot_be_read_is_said_and_replaced(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir()
    file.write_text("{")
    subject = Quarantine(file, PATHS)
    assert subject.pairs == frozenset()
    assert "cannot be read" in caplog.text
    subject.add([PAIR], "it could not be launched")
    assert Quarantine(file, PATHS).pairs == {PAIR}


def settings_for(model: TinyLlama, cache: Path) -> Settings:
    return llama_engine.settings_of(model, cache, attestation_interval_s=0)


def test_a_restarted_engine_serves_without_what_broke(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    settings = settings_for(tiny_llama, tmp_path)
    before = built_engine(settings)
    shape = next(row.shape for row in before.ready.plan if row.phase == "prefill")
    before.quarantine.add([("sdpa.cpu", shape)], "it could not be launched")
    after = built_engine(settings)
    served = {row.phase: (row.path, row.fallback_reasons) for row in after.ready.plan}
    assert served["prefill"] == ("sdpa.math", ["quarantined"])
    assert served["decode"][0] == "sdpa.cpu"


@pytest.mark.parametrize("suspects", [[PAIR], []])
def test_a_device_lost_at_a_start_leaves_a_file_with_suspects(
    tiny_llama: TinyLlama, tmp_path: Path, suspects: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    def lose(*_: object) -> None:
        raise DeviceLost("gone", suspects)

    with pytest.raises(DeviceLost):
        build_engine(settings_for(tiny_llama, tmp_path), frozenset(), lose)
    assert [Quarantine(file, PATHS).pairs for file in tmp_path.glob("quarantine-*")] == [set(suspects)] * len(suspects)
    assert ("quarantined until" in caplog.text) == bool(suspects)


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [("Triton Error [CUDA]: an illegal memory access was encountered", True), ("an error of our own", False)],
)
def test_who_breaks_the_device_before_ready_is_named(
    tiny_llama: TinyLlama, tmp_path: Path, message: str, is_lost: bool
) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError(message)

    runner = built_engine(settings_for(tiny_llama, tmp_path)).runner
    decisions = {shape: it for shape, it in runner.dispatcher.decisions.items() if shape.phase is Phase.EXTEND}
    paths = [replace(path, run=fault) for path in PATHS]
    runner.worker.dispatcher = Dispatcher(decisions, paths, runner.dispatcher.flags, redecide=lambda *_: None)
    limits = EngineLimits(Dtype.FP32, Dtype.FP32, 128, 8, 2048, 2048, page_size=16)
    with pytest.raises(RuntimeError, match=re.escape(message)) as raised, blaming(runner.suspects):
        warm_up(runner, decisions, limits, is_cuda=False, progress=lambda _: None)
    named = raised.value.suspects if isinstance(raised.value, DeviceLost) else []
    assert named == [("sdpa.cpu", str(shape)) for shape in decisions if is_lost]


def test_who_is_to_blame_already_stays_so() -> None:
    with pytest.raises(DeviceLost) as raised, blaming(lambda: [("sdpa.cpu", PAIR[1])]):
        raise DeviceLost("it could not be launched on rank 0", [PAIR])
    assert raised.value.suspects == [PAIR]
