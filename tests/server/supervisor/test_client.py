import asyncio
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest

from server.errors import SettingsError
from server.protocol import wire
from server.protocol.messages import (
    AttestationReport,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineRefused,
    FinishReason,
    FromEngine,
    Heartbeat,
    PlanRow,
    SamplingParams,
    ShadowReport,
    StartBeat,
    StepRecord,
    TokenDelta,
)
from server.settings import Settings
from server.supervisor.client import EngineClient, EngineState
from server.supervisor.start_watch import StartWatch
from support import api
from support.on_a_loop import on_a_loop

FAKE = Path(api.__file__).with_name("fake_engine.py")
STALLS_SOON = {"stall_after_s": 1.0}  # 20 of the fake engine's heartbeats
# An engine's start that imports nothing, 0.03 s where the fake engine takes 0.2: it sends its frames (of the Nth start
# the Nth, where they are named by start), repeats the last one for so many seconds, and ends.
START = """
import re, socket, sys, time
seconds, *frames, path = sys.argv[1:]
life = re.search("-start([0-9]+)/", path)
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
connection.recv(1)  # else the rest of what it was sent would reset the connection before its frames are read
for frame in frames[int(life[1]):][:1] if life else frames:
    connection.sendall(bytes.fromhex(frame))
until = time.monotonic() + float(seconds)
while time.monotonic() < until:
    time.sleep(0.05)
    connection.sendall(bytes.fromhex(frames[-1]))
connection.setblocking(False)
connection.recv(1 << 20)
"""
BEAT = StartBeat(1, "loading", 23)


def start_of(*messages: FromEngine, seconds: float = 0.0) -> list[str]:
    """The command of an engine that starts so and is never ready."""
    frames = [wire.frame(message).hex() for message in messages]
    return [sys.executable, "-I", "-S", "-c", START, str(seconds), *frames]


class Ledger:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.progress: list[EngineProgress] = []
        self.ready: list[EngineReady] = []
        self.refused: list[EngineRefused] = []
        self.steps: list[StepRecord] = []
        self.heartbeats: list[Heartbeat] = []
        self.deaths: list[str] = []
        self.on_progress = self.progress.append
        self.on_ready = self.ready.append
        self.on_refused = self.refused.append
        self.plans: list[list[PlanRow]] = []
        self.on_plan = self.plans.append
        self.on_step = self.steps.append
        self.on_heartbeat = self.heartbeats.append
        self.attestations: list[AttestationReport] = []
        self.on_attestation = self.attestations.append
        self.shadow_reports: list[ShadowReport] = []
        self.on_shadow = self.shadow_reports.append
        self.on_death = self.deaths.append
        self.num_waits = 0

    def on_waiting(self) -> None:
        self.num_waits += 1


def engine_process() -> psutil.Process:
    [found] = [child for child in psutil.Process().children() if str(FAKE) in child.cmdline()]
    return found


def nothing_supervises() -> bool:
    """Return whether no task is left that would start an engine."""
    return all(task.get_name() != "engine-supervisor" for task in asyncio.all_tasks())


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    mode: str = "serve", command: list[str] | None = None, **options: object
) -> AsyncIterator[tuple[EngineClient, Ledger]]:
    """A client whose engine is the fake one in a mode, or another command."""
    ledger = Ledger()
    mode = mode if command is None else ""
    limits = {"backoff_s": (0.01, 0.02), **options}
    client = EngineClient(Settings(), ledger, command=command or [sys.executable, str(FAKE), mode], **limits)  # type: ignore[arg-type]
    await client.start()
    try:
        if mode in ("serve", "slow"):
            await until(lambda: client.state is EngineState.READY)
        yield client, ledger
    finally:
        await client.close()


async def collect(client: EngineClient, name: str, prompt: list[int], max_tokens: int = 3) -> list[TokenDelta]:
    return [delta async for delta in client.stream(name, prompt, SamplingParams(max_tokens=max_tokens))]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@on_a_loop
async def test_streams_at_the_same_time_each_get_their_own_tokens() -> None:
    async with running() as (client, ledger):
        one, two = await asyncio.gather(collect(client, "a", [1, 2]), collect(client, "b", [7], 5))
        assert tokens(one) == [1, 2, 1]
        assert tokens(two) == [7] * 5
        assert one[-1].finish_reason is FinishReason.LENGTH
        assert len(ledger.steps) == 8
        # A prompt that is larger than the socket arrives whole, and before what follows it.
        long, short = await asyncio.gather(collect(client, "c", [7] * 400_000), collect(client, "d", [8]))
        assert (tokens(long), tokens(short)) == ([7, 7, 7], [8, 8, 8])


@on_a_loop
async def test_a_start_is_ended_when_no_rank_gets_further(caplog: pytest.LogCaptureFixture) -> None:
    """The same beat again, which comes for ever, is no progress."""

    command = start_of(BEAT, StartBeat(0, "compiling", 3), BEAT, seconds=60)
    async with running(command=command, start_stall_after_s=0.3) as (_, ledger):
        await until(lambda: bool(ledger.deaths))
        assert ledger.deaths[0] == "stalled"
    [said, *_] = [it.message for it in caplog.records if "the start shows no progress" in it.message]
    assert re.search(r"it is killed: rank 1 is at loading for \d s, rank 0 is at compiling for \d s", said), said


@on_a_loop
async def test_a_start_that_takes_seconds_is_reported_until_it_ends() -> None:
    async def sooner(delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)

    async with running(command=start_of(BEAT, seconds=60), sleep=sooner) as (client, ledger):
        await until(lambda: ledger.num_waits == 2)
        assert client.state is EngineState.STARTING
    async with running(sleep=sooner) as (_, ledger):  # which returns when it is ready
        num_waits = ledger.num_waits
        await asyncio.sleep(0.2)
        assert ledger.num_waits == num_waits


@pytest.mark.parametrize(
    ("command", "limit", "most", "cause", "why"),
    [
        (start_of(BEAT, seconds=60), {"start_stall_after_s": 0.2}, 3, "stalled",
            r"rank 0 has reported nothing, rank 1 is at loading for \d s"),
        (start_of(BEAT, seconds=60), {"connect_within_s": 0.0}, 3, "stalled", "rank 0 has reported nothing"),
        (["false"], {}, 8, "exited", "the log says why"),
        (start_of(EngineFailed("out of memory on rank 1 of 2", [])), {}, 8, "device", "out of memory on rank 1 of 2"),
    ],
    ids=["stalled", "silent", "exits", "fails"],
)  # fmt: skip
@on_a_loop
async def test_starts_that_fail_in_a_row_end_with_their_reason(
    command: list[str], limit: dict[str, float], most: int, cause: str, why: str
) -> None:
    async with running(command=command, **limit) as (client, ledger):
        await until(lambda: client.state is EngineState.REFUSED)
        assert ledger.deaths == [cause] * most
        [refused] = ledger.refused
        assert refused.is_final
        said = rf"{most} starts of the engine failed in a row, the last one \({cause}\): {why}"
        assert re.fullmatch(said, refused.message), refused.message
        await until(nothing_supervises)  # so that nothing is started again
        assert len(ledger.deaths) == most


def in_numbered_folders() -> Callable[[], Path]:
    lives = count()
    return lambda: Path(tempfile.mkdtemp(prefix="hallmark-", suffix=f"-start{next(lives)}"))


@on_a_loop
async def test_starts_that_each_blame_another_path_go_on() -> None:
    blamed = [EngineFailed("illegal memory access", [(f"path {number}", "a shape")]) for number in range(9)]

    command = start_of(*blamed, EngineReady(1, "fake", 64, 4, 16, {}, None, "none", [], 2))
    async with running(command=command, make_folder=in_numbered_folders()) as (client, ledger):
        await until(lambda: bool(ledger.ready))
        assert ledger.deaths[:9] == ["device"] * 9
        assert len(client.quarantined) == 9


def test_a_rank_that_never_reports_is_named_first() -> None:
    now = 0.0
    watch = StartWatch(3, lambda: now)
    watch.beat(StartBeat(2, "loading", 1))
    now = 5.0
    watch.beat(StartBeat(0, "meeting", 1))
    now = 9.0
    said = "rank 1 has reported nothing, rank 2 is at loading for 9 s, rank 0 is at meeting for 4 s"
    assert (str(watch), watch.silent_s) == (said, 4.0)


@on_a_loop
async def test_an_engine_that_gets_ready_ends_the_count_of_failed_starts() -> None:
    """Eight in a row that fail would be the last: seven do, and after one that serves seven more."""
    chosen = f'case "$0" in *-start7/*|*-start15/*) exec {sys.executable} {FAKE} serve "$0";; esac; exit 1'

    async with running(command=["sh", "-c", chosen], make_folder=in_numbered_folders()) as (client, ledger):
        await until(lambda: client.state is EngineState.READY)
        await collect(client, "a", [666])
        await until(lambda: client.state is EngineState.READY)
        assert ledger.deaths == [*["exited"] * 7, "killed", *["exited"] * 7]


@pytest.mark.parametrize(("token", "cause"), [(666, "killed"), (667, "stalled"), (668, "protocol"), (669, "device")])
@on_a_loop
async def test_a_dead_engine_ends_every_stream_and_is_replaced(token: int, cause: str) -> None:
    async with running(**STALLS_SOON if cause == "stalled" else {}) as (client, ledger):
        bystander = asyncio.create_task(collect(client, "bystander", [671]))
        await until(lambda: EngineProgress("submitted", "bystander") in ledger.progress)
        culprit = await collect(client, "culprit", [token])
        for delta in (culprit[-1], (await bystander)[-1]):
            assert (delta.finish_reason, delta.error_code) == (FinishReason.ERROR, "engine_died")
        assert client.state is EngineState.RESTARTING
        await until(lambda: client.state is EngineState.READY)
        assert ledger.deaths == [cause]
        assert len(ledger.ready) == 2
        assert tokens(await collect(client, "culprit", [5])) == [5, 5, 5]


@on_a_loop
async def test_a_prompt_that_two_engines_died_of_is_refused() -> None:
    async with running() as (client, ledger):
        for num_deaths in (1, 2):
            await until(lambda: client.state is EngineState.READY)
            begun = client.stream("begun", [9], SamplingParams(max_tokens=2000))
            await anext(begun)  # it has tokens: it is not to blame
            [killed] = await collect(client, f"killer {num_deaths}", [666, 1])
            assert killed.error_code == "engine_died"
            await begun.aclose()
        [refused] = await collect(client, "killer 3", [666, 1])  # at once, not when the engine is ready again
        assert (refused.error_code, refused.finish_reason) == ("deadly_prompt", FinishReason.ERROR)
        assert "2 engines died while they read this prompt of 2 tokens" in (refused.error_message or "")
        await until(lambda: client.state is EngineState.READY)
        assert tokens(await collect(client, "begun", [9])) == [9, 9, 9]
        assert ledger.deaths == ["killed", "killed"]


@on_a_loop
async def test_a_step_as_long_as_those_of_the_warm_up_is_no_stall() -> None:
    async with running("slow", stall_after_s=0.1) as (client, ledger):
        assert tokens(await collect(client, "a", [672])) == [672] * 3
        assert ledger.deaths == []


@on_a_loop
async def test_an_engine_that_gets_ready_has_a_heartbeat_from_then_on() -> None:
    async with running("silent") as (client, ledger):
        await until(lambda: client.state is EngineState.READY)
        assert client.last_heartbeat is not None
        assert 0 <= time.monotonic() - client.last_heartbeat.sent_at < 10
        assert ledger.heartbeats == []


@on_a_loop
async def test_each_engine_has_heartbeats_of_its_own() -> None:
    async with running() as (client, ledger):
        await until(lambda: bool(ledger.heartbeats))
        assert client.last_heartbeat == ledger.heartbeats[-1]
        await collect(client, "a", [666])
        assert client.state is EngineState.RESTARTING
        assert client.last_heartbeat is None


@on_a_loop
async def test_what_broke_is_quarantined_in_the_next_engine() -> None:
    async with running() as (client, ledger):
        await collect(client, "a", [670])
        await collect(client, "b", [669])
        await until(lambda: len(ledger.ready) == 2)
        wanted = [("fake.prefill", "another shape"), ("fake.decode", "a shape")]
        assert client.quarantined == wanted
        assert [p.detail for p in ledger.progress if p.stage == "quarantined"] == ["[]", repr(wanted)]


@on_a_loop
async def test_a_refusal_is_final() -> None:
    async with running("refuse") as (client, ledger):
        await until(lambda: client.state is EngineState.REFUSED)
        assert client.refused is not None
        assert client.refused.message == "no path for prefill"
        await until(nothing_supervises)  # so that nothing is started again
        assert (len(ledger.refused), ledger.deaths) == (1, [])
        assert (await collect(client, "a", [1]))[-1].error_code == "not_ready"


@on_a_loop
async def test_a_start_that_cannot_succeed_is_not_tried_again() -> None:
    def make_folder() -> Path:
        raise SettingsError("set TMPDIR to a shorter folder")

    async with running("refuse", make_folder=make_folder) as (client, ledger):
        await until(lambda: client.state is EngineState.REFUSED)
        await until(nothing_supervises)  # so that nothing is started again
        refused = EngineRefused("invalid_settings", "set TMPDIR to a shorter folder", [], is_final=True)
        assert (ledger.refused, ledger.deaths) == ([refused], [])


@on_a_loop
async def test_only_a_stream_that_is_left_early_is_cancelled() -> None:
    async with running() as (client, ledger):
        await collect(client, "finished", [1])
        stream = client.stream("left", [671], SamplingParams(max_tokens=9))
        reader = asyncio.create_task(anext(stream))
        await until(lambda: EngineProgress("submitted", "left") in ledger.progress)
        reader.cancel()
        await asyncio.wait([reader])
        await until(lambda: EngineProgress("cancelled", "left") in ledger.progress)
        assert EngineProgress("cancelled", "finished") not in ledger.progress


@on_a_loop
async def test_a_reader_that_stops_is_ended_and_blocks_no_other() -> None:
    async with running(max_unread_tokens=50) as (client, ledger):
        slow = client.stream("slow", [1], SamplingParams(max_tokens=2000))
        first = await anext(slow)
        assert tokens(await collect(client, "quick", [2])) == [2, 2, 2]
        rest = [delta async for delta in slow]
        assert rest[-1].error_code == "slow_client"
        assert 51 <= len(tokens([first, *rest])) < 2000
        await until(lambda: EngineProgress("cancelled", "slow") in ledger.progress)


@on_a_loop
async def test_an_id_that_is_open_is_refused() -> None:
    async with running() as (client, ledger):
        first = asyncio.create_task(collect(client, "a", [671]))
        await until(lambda: EngineProgress("submitted", "a") in ledger.progress)
        with pytest.raises(ValueError, match="open already"):
            await collect(client, "a", [1])
        first.cancel()
        await asyncio.wait([first])


@pytest.mark.parametrize("mode", ["serve", "hang"])
@on_a_loop
async def test_closing_ends_the_process_its_streams_and_its_private_folder_in_seconds(mode: str) -> None:
    async with running(mode) as (client, ledger):
        await until(lambda: bool(ledger.progress))
        process = engine_process()
        pid, socket_path = process.pid, Path(process.cmdline()[-1])
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        reader = asyncio.create_task(collect(client, "a", [671]))
        await asyncio.sleep(0)  # so that the stream is open
        started_at = time.monotonic()
        await client.close()
        assert time.monotonic() - started_at < 30  # one that hangs would do so for 60 s
        assert (await reader)[-1].error_code in ("shutting_down", "not_ready")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert not socket_path.parent.exists()
        assert ledger.deaths == []


@on_a_loop
async def test_a_failed_start_is_tried_again_with_growing_delays() -> None:
    delays_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)
        await asyncio.sleep(0)

    async with running(command=["false"], backoff_s=(2.0, 9.0), sleep=sleep) as (client, _):
        await until(lambda: client.state is EngineState.REFUSED)
    assert [it for it in delays_s if it >= 2.0] == [2.0, 4.0, 8.0, 9.0, 9.0, 9.0, 9.0]


@on_a_loop
async def test_an_attestation_gives_its_report_and_quarantines() -> None:
    async with running() as (client, ledger):
        first, second = await asyncio.gather(client.attestations.ask(), client.attestations.ask())
        assert first is not None
        assert second is not None
        assert first.result == second.result == "mismatch"
        assert ledger.attestations[0] == first
        assert client.attestations.latest is not None
        assert client.quarantined == [("fake.decode", "a shape")]


@on_a_loop
async def test_waiting_for_a_dead_engines_answer_ends() -> None:
    async with running() as (client, ledger):
        stuck = asyncio.create_task(collect(client, "a", [667]))
        await until(lambda: EngineProgress("submitted", "a") in ledger.progress)
        asked = asyncio.gather(client.attestations.ask(), client.quarantine.ask(add=[("fake.decode", "a shape")]))
        await asyncio.sleep(0)  # so that both are asked
        engine_process().kill()
        assert await asked == [None, None]
        assert (await stuck)[-1].error_code == "engine_died"
        await until(lambda: len(ledger.ready) == 2)
        assert await client.attestations.ask() is not None


@on_a_loop
async def test_an_order_crosses_threads_and_is_given_to_the_next_engine() -> None:
    async with running() as (client, ledger):
        pair = ("fake.decode", "a shape")
        order = client.quarantine.ask(add=[pair])
        answer = await asyncio.to_thread(asyncio.run, order)  # as the admin port's loop does
        assert answer is not None
        assert (answer.quarantined, client.quarantine.by_operator) == ([pair], [pair])
        assert ledger.plans == [[]]
        await collect(client, "a", [666])
        await until(lambda: len(ledger.ready) == 2)
        assert [p.detail for p in ledger.progress if p.stage == "overridden"] == ["[]", repr([pair])]
