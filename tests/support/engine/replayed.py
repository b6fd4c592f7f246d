"""An engine in service whose answers are computed again between two bursts of requests."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from random import Random

import torch

from qualification.decision.decision import Policy
from server.engine.execution.forced_answers import ForcedAnswers, Precision
from server.engine.execution.page_bytes import DevicePageBytes
from server.engine.execution.runner import ModelRunner
from server.engine.proof.replay import Replay
from server.engine.proof.shadow_check import ShadowBudget
from server.engine.scheduling.answer_tap import AnswerTap
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.page_seals import PageSeals
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import Runner
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.seal_chain import SealChain
from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import Fork, Grammar, GrammarKind, ReplayReport, SamplingParams, StepOutput, Submit
from server.settings import DeviceChoice, DtypeChoice, Settings
from support.engine.ascii_grammars import ascii_grammars
from support.engine.built_engine import built_engine
from support.engine.reproducible_engine import trust
from support.models.tiny_llama import VOCAB

PAGE_SIZE = 16
SEED = 11
LETTERS = Grammar(GrammarKind.REGEX, "[a-m]{1,40}")
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{1,40}")
# Parameters of which a request draws one, by what they are about.
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=SEED, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=20, temperature=1.0, top_k=20, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=20, temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3, ignore_eos=True
    ),
    "letters": SamplingParams(max_tokens=12, temperature=0.7, grammar=LETTERS),
    "digits": SamplingParams(max_tokens=12, temperature=0.7, grammar=DIGITS),
}

MORE_SAMPLINGS = {
    **SAMPLINGS,
    "likely": SamplingParams(max_tokens=20, temperature=1.0, min_p=0.2, ignore_eos=True),
    "biased": SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((5, 40.0), (17, -40.0)), ignore_eos=True),
}


def settings_of(
    model: Path, cache: Path, dtype: DtypeChoice = DtypeChoice.FP32, *, reproducible: bool = False
) -> Settings:
    """Return the settings of an engine that is built without measurements."""
    return Settings(
        model=str(model),
        device=DeviceChoice.CPU,
        dtype=dtype,
        on_unproven=Policy.QUALIFY if reproducible else Policy.DEGRADE,  # measures nothing
        reproducible=reproducible,
        cache_dir=str(cache),
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        page_size=PAGE_SIZE,
        kv_cache_tokens=128 * PAGE_SIZE,
    )


def runner_of(
    model: Path, cache: Path, dtype: DtypeChoice = DtypeChoice.FP32, *, reproducible: bool = False
) -> ModelRunner:
    """Return the runner of such an engine."""
    chosen = settings_of(model, cache, dtype, reproducible=reproducible)
    return built_engine(chosen, trust if reproducible else None).runner


def _dtypes_of(runner: ModelRunner) -> tuple[torch.dtype, torch.dtype]:
    return runner.worker.decoder.weights.embedding.dtype, runner.worker.kv.layers[0].k.dtype


class IgnoredSeals(PageSeals):
    """Seals that nobody looks at, so that a replay sees what they would."""

    def sound(self, chain: SealChain, keys: Iterable[bytes]) -> Iterator[bytes]:  # noqa: ARG002
        return iter(keys)


@dataclass(frozen=True)
class Tapped:
    """A tap that others are called before."""

    inner: AnswerTap
    first: Callable[[Sequence], None]

    def begin(self, seq: Sequence) -> None:
        self.first(seq)
        self.inner.begin(seq)

    def end(self, seq: Sequence, *, is_sound: bool) -> None:
        self.inner.end(seq, is_sound=is_sound)


class ReplayedEngine:
    """Bursts of requests of every kind, and the reports of their answers."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_pages: int = 64,
        is_exact: bool = False,
        launching: Runner | None = None,
        tap: Callable[[Sequence], None] = lambda _: None,
        asks: Iterable[str] = SAMPLINGS,
        sealed_share: float = 0.0,
        has_seals: bool = True,
        on_step: Callable[[], None] = lambda: None,
        replaying: ModelRunner | None = None,
    ) -> None:
        """Serve by a runner, with pages for more or fewer tokens.

        launching  what the engine calls in place of the runner: a broken one
        tap        is called with each sequence that is queued
        asks       which of MORE_SAMPLINGS requests have
        sealed_share  of the publications of pages, whose bytes are sealed
        has_seals  whether the seals of pages are looked at
        on_step    is called behind each step
        replaying  computes answers again in place of the runner: another engine of the same model
        """
        self.runner = runner
        self._on_step = on_step
        config = runner.worker.decoder.config
        has_grammars = config.vocab_size == VOCAB
        if has_grammars:
            runner.grammars = ascii_grammars()
        self.pool = PagePool(num_pages, PAGE_SIZE)
        kind = PageSeals if has_seals else IgnoredSeals
        seals = kind(self.pool, DevicePageBytes(runner.worker.kv), share=sealed_share)
        limits = SchedulerLimits(128, 8, 64, chunk=config.chunk)
        scheduler = Scheduler(limits, self.pool, shares_pages=True, seals=seals)
        compile_grammar = None if runner.grammars is None else runner.grammars.compile
        self.engine = Engine(
            scheduler, launching or runner, EngineOptions(config.vocab_size, (), SEED), compile_grammar=compile_grammar
        )
        precision = None if is_exact else Precision.of(config, *_dtypes_of(runner))
        if replaying is not None:
            replaying.grammars = runner.grammars
        forced = ForcedAnswers(replaying or runner, scheduler, precision, most_tokens=32)
        seconds = count(step=1000)
        budget = ShadowBudget(0.5, lambda: float(next(seconds)))
        self.replay = Replay(forced, scheduler, budget, rng=Random(SEED))
        self.engine.answers = Tapped(self.replay, tap)
        self.outputs: list[StepOutput] = []
        self._rng = Random(SEED)
        self._num_requests = 0
        wanted = [MORE_SAMPLINGS[name] for name in asks]
        self._samplings = [it for it in wanted if has_grammars or it.grammar is None]
        self._pages = [self.prompt(PAGE_SIZE) for _ in range(3)]

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(4, 90) for _ in range(num_tokens)]

    def burst(self, num_requests: int = 6) -> list[ReplayReport]:
        """Serve some requests at once, and compute those of their answers again that were recorded."""
        self.serve(num_requests)
        return [*self.reports()]

    def serve(self, num_requests: int = 6) -> None:
        """Serve what is queued and some requests more, half of which begin with the same pages in some order."""
        for _ in range(num_requests):
            tail = self.prompt(self._rng.randrange(1, 40))
            forks = [Fork(f"f{self._num_requests}-{index}", index) for index in range(2)]
            self.engine.submit(
                Submit(
                    f"r{self._num_requests}",
                    [*chain(*self._rng.sample(self._pages, 3)), *tail] if self._rng.random() < 0.5 else tail,
                    self._rng.choice(self._samplings),
                    cache_salt=self._rng.choice((b"one", b"another")),
                    forks=forks if self._rng.random() < 0.3 else [],
                )
            )
            self._num_requests += 1
        while self.engine.has_work:
            output = self.engine.step()
            self.outputs += [] if output is None else [output]
            self._on_step()
        assert self.engine.step() is None  # idle: the pages are counted

    def reports(self) -> Iterable[ReplayReport]:
        """Compute again what waits."""
        while self.replay.has_waiting:
            report = self.replay.step()
            if report is not None:
                yield report
