"""A rank beside rank 0: `python -m server.engine.follower DESCRIPTOR`, started by server/engine/execution/followers.py.

It gets step buffers and sees no sequence: it launches what rank 0 launches, on its own part of the model.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.calls.launch import install_compile_counter
from kernels.collective.inboxes import PeerMemoryError
from kernels.linear.library.fallbacks import MatmulFallbacks
from kernels.system.hang_up import leave_with, wait_for_hang_up
from kernels.system.triton_cache import use_own_cache
from qualification.decision.decision import Decision, Pairs, ShapeT
from server.engine.execution.capture import Capture, CudaCapture, Replayable
from server.engine.execution.commands import (
    Allocate,
    Begin,
    ChooseProducts,
    Command,
    CompareMemory,
    ComputeLogits,
    CopyPages,
    Decide,
    Declare,
    FollowStep,
    KernelsCompiled,
    Launch,
    OtherSideGone,
    RankChecked,
    RankDecided,
    RankFallbacks,
    RankProgress,
    Record,
    RecordStep,
    Repeat,
    Replay,
    Report,
    Reports,
    RunPadding,
    ShareTokens,
    Started,
    WriteEmbeddings,
    WriteImages,
    receive,
)
from server.engine.execution.followers import meet_ranks, refuse, report_of
from server.engine.execution.graph_keys import GraphKey
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.step_buffer import StepBuffer, StepLayout, with_embedding_rows
from server.engine.execution.worker import Worker
from server.engine.operators.decisions import decided
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import is_device_lost
from server.engine.operators.linear import MeasuredProducts
from server.engine.proof.rank_check import JudgedCall
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.startup.kv_sizing import room_beside_peak
from server.engine.startup.matmul_tuning import choose_products, measure_nothing
from server.engine.startup.proofs import judge_blank
from server.engine.startup.start_progress import StartProgress
from server.engine.startup.subject import (
    Say,
    Subject,
    connected_ranks,
    decoder_of,
    dispatcher_of,
    head_of,
    identity_of,
    kv_cache_of,
    load_own_tower,
    load_weights,
    read_subject,
)
from server.errors import StartError
from server.log import configure_logging
from server.model.decoder import Decoder
from server.model.draft_head import DraftHead
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache
from server.model.vision.tower import Tower

logger = logging.getLogger(__name__)
_READ_S = 5.0  # that rank 0 has to read the last report


class StepInputs:
    """Host memories that steps' inputs are received into, in turns.

    What rank 0 sends next follows the end of its step before the latest one, which this rank was part of. So of models
    without a head two are enough: the device has copied what is written over. With one, the passes behind both steps
    may still have to be copied: four behind each at most.
    """

    def __init__(self, *, is_pinned: bool, has_head: bool = False) -> None:
        self._is_pinned = is_pinned
        self._memories = [torch.zeros(0, dtype=torch.uint8) for _ in range(10 if has_head else 2)]
        self._turn = 0
        self.latest = self._memories[0]

    def take(self, num_bytes: int) -> memoryview:
        """Return memory for the next inputs, which are `latest` from then on."""
        turn = self._turn = (self._turn + 1) % len(self._memories)
        if num_bytes > self._memories[turn].numel():
            self._memories[turn] = torch.zeros(2 * num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        self.latest = self._memories[turn][:num_bytes]
        return self.latest.numpy().data


class Follower:
    """One rank's part of the model, and what rank 0 has sent about it."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        *,
        dispatcher: Dispatcher,
        kv_of: Callable[[int], KVCache],
        new_capture: Callable[[], Capture],
        tower: Tower | None = None,
        head: DraftHead | None = None,
        num_hidden: int = 0,
        send: Callable[[Report], None] = lambda _: None,
    ) -> None:
        """`dispatcher`: the tables that the decoder was built with; `new_capture` makes what records graphs.

        `tower`: of a model that sees images. `head`, `num_hidden`: as of `Worker`. `send`: to rank 0, which compares
        the paths that are launched here with its own.
        """
        self._head, self._num_hidden = head, num_hidden
        self._tower = tower
        self.inputs = StepInputs(is_pinned=device.type == "cuda", has_head=head is not None)
        self._decoder = decoder
        self._ranks = decoder.ranks
        self._device = device
        self._kv_of = kv_of
        self._new_capture = new_capture
        self._dispatcher = dispatcher
        self._held: Worker | None = None
        self._keys: list[GraphKey] = []
        self._layouts: dict[GraphKey, StepLayout] = {}
        self._capture: Capture | None = None
        self._recorded: Replayable | None = None
        self._allocated_bytes = 0
        self._check = ShadowCheck(dispatcher, budget=0, interval_s=0, is_quarantining=False)  # of calls rank 0 names
        self._send = send
        send(RankDecided(dispatcher.paths_served))

    @property
    def _worker(self) -> Worker:
        if self._held is None:
            raise ValueError("rank 0 sent a step before the memory for it")
        return self._held

    def obey(self, command: Command) -> None:
        """Do what rank 0 does, too. Raises whatever keeps this rank from it."""
        match command:
            case Replay(index):
                key = self._keys[index]
                self._worker.repeat(StepBuffer(key, self._layouts[key], self.inputs.latest, True))
            case ShareTokens(num_rows):
                self._ranks.share(self._worker.tokens.latest[:num_rows])
            case Launch():
                self._launch(command)
            case FollowStep(parts, num_sampled, has_pending, is_first, place, is_observed):
                layout = StepLayout(parts, num_sampled, self._worker.head_arrays)
                observation = self._worker.head_observation() if is_observed else None
                buffer = self._buffer(layout, has_pending)
                self._worker.follow(buffer, is_first=is_first, place=place, observation=observation)
            case CopyPages(copies):
                self._worker.copy_pages(copies)
            case WriteEmbeddings(rows, values):
                self._worker.write_embeddings(rows, values)
            case WriteImages(images):
                self._worker.write_images(images)
            case ComputeLogits(num_rows):
                self._worker.logits(self._ranks.share(self._hidden_rows(num_rows)))
            case Allocate(num_pages, num_rows, num_slots, num_embeddings):
                self._allocate(num_pages, num_rows, num_slots, num_embeddings)
            case CompareMemory():
                self._ranks.least(room_beside_peak(self._device, self._allocated_bytes))
            case Declare(sizes, max_context):
                self._layouts = self._worker.declare(sizes, max_context)
                self._keys = list(self._layouts)
                self._capture = self._new_capture()
            case RunPadding(index):
                self._worker.run_padding(self._keys[index])
            case Record(index):
                assert self._capture is not None
                self._worker.capture(self._keys[index], self._capture)
                gc.freeze()  # what lives as long as the engine is not scanned again in the middle of a step
            case RecordStep(parts, num_sampled, num_state_writes, has_pending):
                layout = StepLayout(parts, num_sampled, self._worker.token_arrays, num_state_writes)
                self._record(self._buffer(layout, has_pending))
            case Repeat(None):
                assert self._recorded is not None
                self._recorded.replay()
            case Repeat(int(index)):
                self._worker.run_graph(self._keys[index])
            case Decide(decisions):
                self._dispatcher.decide(decided(decisions).values())
                self._send(RankDecided(self._dispatcher.paths_served))
            case _:
                raise ValueError(f"rank 0 sent {type(command).__name__}, which is not due now")

    def _launch(self, command: Launch) -> None:
        """Compute a step, and judge the call of it that is named to this rank, if one is."""
        worker, call = self._worker, command.checked
        arrays = with_embedding_rows(worker.token_arrays) if command.has_embedded else worker.token_arrays
        layout = StepLayout(command.parts, command.num_sampled, arrays, command.num_state_writes)
        buffer = self._buffer(layout, command.has_pending)
        tap = None if call is None or call.rank != self._ranks.index else self._check.tap_of(call)
        with nullcontext() if tap is None else tap.watching():
            observation = worker.observation() if command.is_observed else None
            worker.launch(buffer, tap=None if tap is None else tap.attention, observation=observation)
        worker.drop_unread()
        if call is not None and tap is not None:
            nothing = JudgedCall(call.rank, "none", call.lane, call.lane, detail="the step has no such call")
            self._send(RankChecked(self._check.judged(call.rank) or nothing))

    def _record(self, buffer: StepBuffer) -> None:
        """Record a step, which nothing needs but its times: an error is logged, and rank 0 has nothing repeated."""
        self._recorded = None  # its memory goes first
        try:
            self._recorded = self._worker.record(buffer, self._new_capture())
        except RuntimeError as error:
            if is_device_lost(error):
                raise
            logger.warning("this rank cannot record a step for its times: %s", error)
        self._ranks.least(int(self._recorded is not None))

    def _allocate(self, num_pages: int, num_rows: int, num_slots: int, num_embeddings: int) -> None:
        self._held = None  # its cache goes first
        tokens = SampledTokens(num_rows, self._device)
        dtype = self._decoder.weights.embedding.dtype
        states = StateCache.allocate(self._decoder.config, num_slots, dtype, self._device)
        self._held = Worker(
            self._decoder,
            self._kv_of(num_pages),
            self._dispatcher,
            tokens,
            rank=self._ranks,
            states=states,
            num_embeddings=num_embeddings,
            tower=self._tower,
            head=self._head,
            num_hidden=self._num_hidden,
        )
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated_bytes = torch.cuda.memory_allocated(self._device)

    def _buffer(self, layout: StepLayout, has_pending: bool) -> StepBuffer:
        return StepBuffer(None, layout, self.inputs.latest, has_pending)

    def _hidden_rows(self, num_rows: int) -> Tensor:
        return self._decoder.weights.embedding.new_empty(num_rows, self._decoder.config.hidden_size)


class Refused(Exception):
    """Refusal of this rank to serve; rank 0 has the reason."""


class StartedFollower:
    """A follower as `Begin` describes it, and the commands that it needs the settings for."""

    def __init__(
        self,
        begin: Begin,
        say: Say = lambda _: None,
        send: Callable[[Report], None] = lambda _: None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the rank's part; `say` gets how much is loaded. `send` as of `Follower`. Raises Refused.

        `wait`: for what rank 0 compiles ahead, before the first launch.
        """
        settings, world = begin.settings, begin.settings.tensor_parallel_size
        try:
            subject = read_subject(settings, begin.rank)
        except StartError as error:
            refuse(begin.meeting, begin.rank, world, error.message)
            raise Refused(error.message) from error
        self._subject: Subject = subject
        self._is_reproducible = settings.reproducible
        ranks = meet_ranks(begin.meeting, begin.rank, world, identity_of(settings, subject))
        try:
            ranks = connected_ranks(subject, ranks) if begin.shares_memory else ranks
        except PeerMemoryError as error:  # on rank 0 too
            raise Refused(str(error)) from error
        self._weights = load_weights(settings, subject, say)
        wait()
        judge_blank(subject)
        self.fallbacks = MatmulFallbacks()
        self._measured = MeasuredProducts.of(self.fallbacks.note)
        # This rank decides nothing, and its metrics count nothing.
        dispatcher = dispatcher_of(
            subject, decided(begin.decisions), self._measured, redecide=_decide_nothing, has_timer=False
        )
        decoder = decoder_of(subject, self._weights, dispatcher, ranks)
        self.follower = Follower(
            decoder,
            subject.device,
            dispatcher=dispatcher,
            kv_of=partial(kv_cache_of, subject),
            new_capture=lambda: CudaCapture(subject.device, names_kernels=False),
            tower=load_own_tower(settings, subject, dispatcher, say),
            head=head_of(subject, self._weights, dispatcher, decoder),
            num_hidden=subject.limits.max_num_batched_tokens,
            send=send,
        )

    def obey(self, command: Command) -> None:
        """Do what rank 0 does, too."""
        if not isinstance(command, ChooseProducts):
            self.follower.obey(command)
            return
        choose_products(
            self._weights,
            self._subject.config,
            self._subject.limits,
            Path(command.file),
            self._subject.device,
            self._measured.in_order if self._is_reproducible else self._measured.by_time,
            self.fallbacks,
            measure=measure_nothing,
        )


def _decide_nothing(shape: ShapeT, _: Pairs, __: Pairs) -> Decision[ShapeT]:
    raise RuntimeError(f"only rank 0 decides what serves {shape}")


def _wait_for_kernels(connection: socket.socket) -> None:
    command, _ = receive(connection)
    if not isinstance(command, KernelsCompiled):
        raise ValueError(f"rank 0 sent {type(command).__name__} before KernelsCompiled")


def main() -> None:
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 ends, and we with it
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=leave_with, args=(connection, os._exit), name="rank-0-watch", daemon=True).start()
    reports, begin = Reports(connection), None
    progress = StartProgress(lambda stage, count: reports.send(RankProgress(stage, count)))
    try:
        begin, _ = receive(connection)
        if not isinstance(begin, Begin):
            raise ValueError(f"the first command must be Begin, got {type(begin).__name__}")
        configure_logging(begin.settings.log_format)
        use_own_cache()
        install_compile_counter()
        progress.note("loading")
        started = StartedFollower(
            begin, lambda _: progress.note("loading"), reports.send, lambda: _wait_for_kernels(connection)
        )
        while True:
            command, _ = receive(connection, started.follower.inputs.take)
            if isinstance(command, Started):
                progress.end()
                continue
            progress.note(type(command).__name__)
            started.obey(command)
            if counts := started.fallbacks.take():
                reports.send(RankFallbacks(counts))
    except OtherSideGone:
        os._exit(0)
    except Refused:
        signal.pause()  # rank 0 says why, and its end is this process's
    except Exception as error:  # the edge of the process: this is logged, and all ranks start again
        logger.exception("this rank cannot go on")
        if isinstance(begin, Begin):
            reports.send(report_of(error, begin.rank, begin.settings.tensor_parallel_size))
            # Rank 0 ends all when it has read that. The end of this process would reach it as an error of the network.
            wait_for_hang_up(connection, _READ_S)
        os._exit(70)  # EX_SOFTWARE


if __name__ == "__main__":
    main()
