"""A real engine to attest, on a tiny Llama and a CPU, whose evidence is written down here instead of measured."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.catalog import PATHS
from kernels.driver.driver_record import Recorder
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape
from qualification.decision.decision import Decision, Pairs, Policy
from qualification.evidence.evidence import Evidence
from qualification.measure.qualify import Bench, Pair
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.attestation import Attestor
from server.engine.proof.judgement import Judge
from server.engine.proof.step_record import StepRecords, TimeStep
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.warmup import probes_of
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, Settings
from support.engine.built_engine import built_engine
from support.models.tiny_llama import TinyLlama
from support.qualification_fakes import evidence

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Subject:
    """An engine whose own evidence proves its shapes and names their kernels."""

    built: BuiltEngine
    decisions: dict[AttentionShape, Decision[AttentionShape]]

    @classmethod
    def made(cls, model: TinyLlama, cache: Path) -> "Subject":
        built = build(settings_for(model, cache))
        return cls(built, built.runner.dispatcher.decisions)

    def attestor(
        self,
        paths: Iterable[KernelPath] = PATHS,
        *,
        is_quarantining: bool = True,
        interval_s: float = 0.0,
        clock: Callable[[], float] = float,
        of_two: Container[str] = frozenset(),
        recorder: Recorder | None = None,
        time_step: TimeStep = lambda _: None,
    ) -> tuple[Attestor, Dispatcher]:
        """Make an attestor of the same model, on a dispatcher of its own whose paths may lie."""
        runner, own = self.built.runner, self.built.attestor
        runner.worker.dispatcher = Dispatcher(self.decisions, paths, runner.dispatcher.flags, redecide=self.redecide)
        records = StepRecords(
            runner,
            lambda: runner.attention,
            runner.dispatcher,
            device=own.records.device,
            recorder=recorder,
            time_step=time_step,
        )
        found = Attestor(
            records,
            Judge(own.judge.promises),
            runner.dispatcher,
            probes=probes_of(self.decisions, page=runner.num_pages, page_size=16, max_len=128, of_two=of_two),
            is_quarantining=is_quarantining,
            interval_s=interval_s,
            clock=clock,
        )
        return found, runner.dispatcher

    def redecide(self, shape: AttentionShape, _: Pairs, __: Pairs) -> Decision[AttentionShape]:
        return replace(self.decisions[shape], path="sdpa.math")

    def tokens(self, name: str, between: Callable[[], object] = int) -> list[int]:
        """A greedy answer; `between` is called after the first step."""
        engine, found = self.built.engine, []
        engine.submit(Submit(name, [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0)))
        while engine.has_work:
            output = engine.step()
            found += [token for delta in output.deltas for token in delta.token_ids] if output else []
            between()
        return found


def build(settings: Settings) -> BuiltEngine:
    return built_engine(settings, proving)


def proving(pairs: Sequence[Pair], bench: Bench, *, on_evidence: Callable[[Evidence], None], **_: object) -> None:
    """Stands in for `qualify`: prove every pair without a measurement, whose result may depend on the machine."""
    for shape, path in pairs:
        on_evidence(evidence(shape, path, fingerprint=bench.fingerprint, kernels=kernels_of(path.name)))


def kernels_of(path: str) -> tuple[str, ...]:
    """Return the operators that a call of the path launches on a CPU, by the profiler's names."""
    return ("aten::bmm", "aten::_softmax") if path == "sdpa.math" else (FLASH,)


def settings_for(model: TinyLlama, cache: Path) -> Settings:
    return Settings(
        model=str(model.folder),
        device=DeviceChoice.CPU,
        on_unproven=Policy.QUALIFY,
        max_model_len=128,
        kv_cache_tokens=2048,
        max_num_seqs=8,
        cache_dir=str(cache),
    )


def refuses(*_: object) -> None:
    raise RuntimeError("No available kernel. Aborting execution.")
