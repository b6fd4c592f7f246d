"""A small model that is served with a fault, and what each check sees of it.

The evidence of all kernels is honest, as where a library is exchanged beneath them: what the qualification would see
is not the subject. The layers are held to the plain forward pass, as before an engine is ready. Then, whatever that has
found, bursts of requests of every kind are served; every step is a shadow check's, and answers are computed again.
"""

from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch

from kernels.catalog import ALL_PATHS
from kernels.experts.paths import ExpertsPath
from kernels.linear.paths import LinearPath
from kernels.system.device import torch_dtype
from kernels.vocabulary.path import AnyPath, KernelPath
from qualification.decision.decision import Decision
from qualification.model.forward.model import ForwardReference
from served_faults.mix import golden_of, why_wrong
from served_faults.plant import Fault, Kind, Model, Plant
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.linear import MeasuredProducts
from server.engine.proof.layer_check import LayerCheck, LayersChecked
from server.engine.proof.layer_steps import LayerSteps
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.startup.subject import Subject, dispatcher_of, kv_cache_of, operators_of, read_subject
from server.model.layers import Weights
from server.model.load.load import load_config, load_decoder
from server.model.ranks import ALONE
from server.protocol.messages import ShadowReport
from server.settings import DtypeChoice, LoadFormat
from support.engine.checked_layers import edited
from support.engine.replayed import MORE_SAMPLINGS, ReplayedEngine, runner_of, settings_of
from support.engine.serving_faults import BrokenRunner, BrokenWriter
from support.models.served_families import saved
from support.models.tiny_families import LLAMA3

NUM_PAGES = 64
SEALED_SHARE = 1.0 / 64
SEED = 11
_CHANGES: dict[Model, dict[str, Any]] = {
    Model.LLAMA: {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    Model.WINDOWED: {"sliding_window": 9},
    Model.MIXTURE: {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16, "n_group": 4,
        "topk_group": 2, "use_qk_norm": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Results of all checks: after how many of its kind each saw the fault, None where it saw nothing.

    layers   where the check of the layers found the first difference
    shadow, replay  of how many checks, the latest saw it
    seals    hits of pages up to the first one that was dropped
    errors   answers up to the first one that ended with an error, which its client gets and a counter counts
    canary   what the canary's mix says, which is asked when somebody runs it
    checks   how many there were of each of the four
    """

    layers: str | None
    shadow: int | None
    replay: int | None
    seals: int | None
    errors: int | None
    canary: str | None
    causes: tuple[str, ...]
    checks: dict[str, int]

    @property
    def is_caught(self) -> bool:
        found = (self.layers, self.shadow, self.replay, self.seals, self.errors, self.canary)
        return any(it is not None for it in found)


class Served:
    """A model that is loaded and planned once, and served with one fault after another."""

    def __init__(
        self, model: Model, folder: Path, *, dtype: DtypeChoice = DtypeChoice.FP32, reproducible: bool = False
    ) -> None:
        self.model = model
        self._folder = folder
        self._is_exact = reproducible
        files = folder / "model"
        saved(files, model.value, **_CHANGES[model])
        self._own = runner_of(files, folder / "cache", dtype, reproducible=reproducible)
        self.subject: Subject = read_subject(settings_of(files, folder / "cache", dtype, reproducible=reproducible))
        torch.set_num_threads(1)  # for tensors this small threads wait for each other
        self._num_edited = count()
        right = Fault("none", Kind.BATCH, Plant, model)
        self._golden = golden_of(Service(self.runner(Plant()), Plant(), right, is_exact=reproducible).engine)

    def runner(self, plant: Plant) -> ModelRunner:
        """Return the runner of an engine with the fault."""
        subject = self.subject

        def redecide(shape: Any, _: object, __: object) -> Decision[Any]:
            return decisions[shape]

        decisions: dict[Any, Decision[Any]] = {it.shape: it for it in self._own.dispatcher.all_decisions}
        dispatcher = dispatcher_of(
            subject, decisions, MeasuredProducts.of(lambda *_: None), redecide=redecide, has_timer=False
        )
        for table in (dispatcher.attention, *dispatcher.tables):
            for path in {it.path for it in table.plan.values()}:
                table.substitute(_wrong(next(it for it in ALL_PATHS if it.name == path), plant))
        config = replace(subject.config, max_position=subject.limits.max_model_len)
        config, weights = plant.model(config, self._weights(plant))
        operators = replace(operators_of(dispatcher), is_reproducible=subject.reproducible)
        decoder = plant.decoder(config, weights, ALONE, operators)
        worker = Worker(decoder, kv_cache_of(subject, NUM_PAGES), dispatcher, SampledTokens(32, subject.device))
        if plant.sampler is not None:
            worker.sampler = plant.sampler
        runner = ModelRunner(worker)
        if plant.buffer is not None:
            runner.writer = BrokenWriter(runner, plant.buffer)
        return runner

    def _weights(self, plant: Plant) -> Weights:
        """Return the weights of the files, a copy where a fault may write to them."""
        folder = self.subject.folder
        if plant.tensors is not None:
            folder = edited(folder, self._folder / f"edited-{next(self._num_edited)}", change=plant.tensors)
        return load_decoder(
            folder, load_config(folder), dtype=torch_dtype(self.subject.limits.dtype), device=self.subject.device,
            load_format=LoadFormat.AUTO,
        ).weights  # fmt: skip

    def check_layers(self, runner: ModelRunner) -> LayersChecked:
        """Hold the layers to the plain forward pass of the files, as a start does."""
        subject, limits = self.subject, self.subject.limits
        steps = LayerSteps(
            vocab_size=subject.model.vocab_size,
            page_size=limits.page_size,
            num_pages=runner.num_pages,
            max_len=limits.max_model_len,
            max_tokens=limits.max_num_batched_tokens,
            max_rows=limits.max_num_seqs,
        ).all()
        reference = ForwardReference(
            subject.folder, subject.model, torch_dtype(limits.dtype), subject.device, context=limits.max_model_len
        )
        try:
            return LayerCheck(runner, reference, runner.worker.logits, kv_dtype=torch_dtype(limits.kv_dtype)).run(steps)
        finally:
            reference.close()

    def look(self, fault: Fault) -> Seen:
        """Serve with a fault until all checks have seen it, or have looked often enough."""
        plant = fault.plant()
        runner = self.runner(plant)
        layers = self.check_layers(runner)
        service = Service(runner, plant, fault, is_exact=self._is_exact)
        service.run()
        first = None if layers.first is None else layers.first.section
        return replace(service.seen(), layers=first, canary=why_wrong(service.engine, self._golden))


class Service:
    """An engine with a fault that serves, and its checks."""

    def __init__(self, runner: ModelRunner, plant: Plant, fault: Fault, *, is_exact: bool) -> None:
        self._fault = fault
        seconds = count(step=10)
        self._shadow = ShadowCheck(
            runner.dispatcher,
            budget=1.0,
            interval_s=0.0,
            is_quarantining=False,
            clock=lambda: float(next(seconds)),
            rng=Random(SEED),
        )
        self._runner, self._step = runner, plant.step
        self.engine = ReplayedEngine(
            runner,
            num_pages=fault.num_pages,
            is_exact=is_exact,
            launching=BrokenRunner(runner, plant.batch, plant.during, plant.result),
            tap=plant.queued,
            asks=fault.asks or MORE_SAMPLINGS,
            sealed_share=SEALED_SHARE,
            on_step=self._on_step,
        )
        if runner.grammars is not None:
            runner.grammars = plant.grammars(runner.grammars)
        runner.shadow = self._shadow
        self._num: dict[str, int] = dict.fromkeys(("shadow", "replay", "seals", "errors"), 0)
        self._first: dict[str, int] = {}
        self._causes: list[str] = []

    def run(self) -> None:
        """Serve bursts of requests."""
        while self._num["replay"] < self._fault.most_answers and not {"replay", "shadow"} <= self._first.keys():
            outputs = len(self.engine.outputs)
            for report in self.engine.burst(8):
                self._num["replay"] += report.result != "skipped"
                if report.cause is not None:
                    self._note("replay", f"{report.cause} of an answer that was {report.route}")
            for output in self.engine.outputs[outputs:]:
                self._num["seals"] += output.record.num_prefix_hit_tokens > 0 or output.record.num_page_mismatches > 0
                if output.record.num_page_mismatches:
                    self._note("seals", "a page that is dropped")
                for delta in output.deltas:
                    self._num["errors"] += delta.finish_reason is not None
                    if delta.error_code is not None:
                        self._note("errors", delta.error_code)

    def seen(self) -> Seen:
        first = self._first
        return Seen(
            layers=None,
            shadow=first.get("shadow"),
            replay=first.get("replay"),
            seals=first.get("seals"),
            errors=first.get("errors"),
            canary=None,
            causes=tuple(self._causes),
            checks=dict(self._num),
        )

    def _on_step(self) -> None:
        report: ShadowReport | None = self._shadow.judge()
        if report is not None and report.result != "skipped" and "shadow" not in self._first:
            self._num["shadow"] += 1
            if report.result == "mismatch":
                self._note("shadow", report.phase)
        self._step(self._runner)

    def _note(self, check: str, cause: str) -> None:
        if check not in self._first:
            self._first[check] = self._num[check]
            self._causes.append(f"{check}: {cause}")


def _wrong(path: AnyPath, plant: Plant) -> AnyPath:
    run: Any = path.run
    assert run is not None
    if isinstance(path, KernelPath):
        return replace(path, run=plant.attention(run))
    if isinstance(path, LinearPath):
        return replace(path, run=plant.product(run))
    if isinstance(path, ExpertsPath):
        return replace(path, run=plant.experts(run))
    return path
