"""A tower in an engine: planned, attested, checked in service, and named in what a request says."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from torch import Tensor

from kernels.catalog import path_named
from kernels.driver.seen import Seen
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Policy
from server.engine.operators.table import OperatorChoice
from server.engine.proof.shadow_check import ShadowCheck, TowerLane
from server.engine.startup.builder import BuiltEngine
from server.protocol.messages import LayersStatus, SamplingParams, ShadowReport, StepOutput, Submit
from server.protocol.plan_rows import TOWER
from server.settings import DeviceChoice, Settings
from support.engine.attested import FLASH, proving
from support.engine.built_engine import built_engine
from support.models.tiny_images import GEMMA, GEMMA_4_LARGE, image_of, prompt_of, save_tiny


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    folder = tmp_path_factory.mktemp("tower")
    save_tiny(folder)
    return built_engine(settings_of(folder), proving)


def settings_of(folder: Path) -> Settings:
    return Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        on_unproven=Policy.QUALIFY,
        max_model_len=256,
        max_image_tokens=64,
        max_num_batched_image_tokens=32,
        max_num_batched_tokens=64,
        kv_cache_tokens=1024,
        max_num_seqs=4,
        cache_dir=str(folder / "cache"),
        layer_check=False,
        shadow_budget=0.0,
    )


def answer(built: BuiltEngine, seed: int, num_tokens: int = 3, height: int = 4) -> list[StepOutput]:
    """Answer a prompt with an image of 4 x 6 patches."""
    ids, images = prompt_of(5, 6, image_of(seed, height, 6, 14), 7)
    built.engine.submit(Submit(f"r{seed}", ids, SamplingParams(max_tokens=num_tokens, temperature=0.0), images=images))
    found = []
    while (output := built.engine.step()) is not None:
        found.append(output)
    return found


def test_the_plan_holds_a_towers_attention_and_products(built: BuiltEngine) -> None:
    of_tower = [row for row in built.ready.plan if row.phase == TOWER]
    # Images of up to 64 tokens have up to 256 patches.
    assert [row.shape for row in of_tower] == [
        f"prefill fp32 h4:4 d12 q-{bucket} c-{bucket} full" for bucket in ("le_128", "le_512")
    ]
    products = {row.shape.rpartition(" ")[0] for row in built.ready.plan if row.phase == "linear"}
    assert products >= {
        f"linear fp32 plain {sizes}"
        for sizes in ("in1176 out48", "in48 out144 bias", "in48 out128 bias", "in192 out64 bias")
    }
    assert all(row.path is not None and row.status == "provisional" for row in built.ready.plan)


def test_a_start_attests_the_tower(built: BuiltEngine) -> None:
    assert built.attested is not None
    batch = next(it for it in built.attested.batches if it.phase == TOWER)
    assert batch.result == "match", batch.detail
    assert {"sdpa.cpu", "torch.linear"} <= set(batch.paths)


def test_a_towers_time_is_explained_where_the_driver_times_it(
    built: BuiltEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted kernels and times stand in for the driver's."""
    probes = built.attestor.towers
    assert probes is not None
    monkeypatch.setattr(OperatorChoice, "is_capturable", True)
    seconds = {FLASH: 9.0, "_rms_norm_kernel": 0.5, "nvjet_a": 0.25, "planted": 0.25}
    passes: list[str] = []
    timed: list[str] = []

    class Driver:
        calls: tuple[Counter[str], ...] = ()

        def mark(self) -> AbstractContextManager[None]:
            self.calls += (Counter({FLASH: 1}),)
            return nullcontext()

        def take(self) -> Seen:
            calls, self.calls = self.calls, ()
            return Seen(calls, Counter())

        def capture(self, work: Callable[[], None]) -> str:
            work()
            passes.append("captured")
            return "graph"

        def node_names(self, _: str) -> Counter[str]:
            return Counter(seconds)

        def node_seconds(self, graph: str) -> dict[str, float]:
            timed.append(graph)
            return seconds

    recorded = replace(probes, recorder=Driver())  # type: ignore[arg-type]
    found, _ = recorded.attest(probes.grids[0])
    assert (found.result, passes) == ("match", ["captured"])
    assert found.explained is not None
    assert found.explained.seconds == {"evidence": 9.0, "named": 0.5, "unproven": 0.25, "unexplained": 0.25}
    again, _ = recorded.attest(probes.grids[0])
    assert again == found
    assert len(timed) == 1  # the same kernels are not run again


def test_kernels_of_another_path_are_a_mismatch(built: BuiltEngine) -> None:
    tables, probes = built.runner.dispatcher.tower, built.attestor.towers
    assert tables is not None and probes is not None  # noqa: PT018
    tables.attention.substitute(replace(path_named("sdpa.cpu"), run=path_named("sdpa.math").run))
    try:
        found, wrong = probes.attest(probes.grids[0])
    finally:
        tables.attention.substitute(path_named("sdpa.cpu"))
    assert found.result == "mismatch"
    assert wrong == [("sdpa.cpu", Phase.PREFILL)]


def test_a_request_names_what_computed_its_images(built: BuiltEngine) -> None:
    outputs = answer(built, 1)
    deltas = [delta for output in outputs for delta in output.deltas]
    uses = {(use.phase, use.path) for delta in deltas for use in delta.path_uses or ()}
    assert {(TOWER, "sdpa.cpu"), ("prefill", "sdpa.cpu")} <= uses
    times = next(delta.times for delta in deltas if delta.times is not None)
    assert times.num_computed_images == 1
    assert times.tower_s is not None
    assert 0 < times.tower_s < times.first_token_at - times.submitted_at
    counts = {(it.phase, it.bucket): it for output in outputs for it in output.record.dispatches}
    assert (counts[TOWER, "le_128"].num_launches, counts[TOWER, "le_128"].num_tokens) == (4, 6)  # layers; tokens
    # The same image again: nothing is computed, and what had computed it is named.
    again = [delta for output in answer(built, 1) for delta in output.deltas]
    assert any((use.phase, use.path) == (TOWER, "sdpa.cpu") for delta in again for use in delta.path_uses or ())
    assert next(delta.times for delta in again if delta.times is not None).num_computed_images == 0


@pytest.mark.parametrize("index", [0, 2, 5])  # a product; the first layer's attention; another product
def test_a_shadow_check_looks_at_the_tower(built: BuiltEngine, index: int) -> None:
    report = Checks(built).report(100 + index, index)
    assert (report.phase, report.result) == (TOWER, "match"), report.detail
    assert report.weight is not None
    assert report.weight.startswith("tower_")


def test_wrong_attention_of_a_tower_is_quarantined(built: BuiltEngine) -> None:
    own = path_named("sdpa.cpu")

    def spoilt(q: Tensor, k: Tensor, v: Tensor, batch: object, flags: object, out: Tensor) -> None:
        own.run(q, k, v, batch, flags, out)  # type: ignore[misc, arg-type]
        out *= 1.5

    tables = built.runner.dispatcher.tower
    assert tables is not None
    tables.attention.substitute(replace(own, run=spoilt))
    checks = Checks(built)
    first = checks.report(200, 2)
    assert (first.result, first.quarantined) == ("mismatch", [])
    second = checks.report(201, 2)
    assert second.quarantined
    assert {path for path, _ in second.quarantined} == {"sdpa.cpu"}
    uses = [use for output in answer(built, 202) for delta in output.deltas for use in delta.path_uses or ()]
    of_tower = next(use for use in uses if use.phase == TOWER)
    assert of_tower.path != "sdpa.cpu"
    assert "quarantined" in of_tower.fallback_reasons


@pytest.mark.parametrize(("kind", "in_windows"), [(GEMMA, {False, True}), (GEMMA_4_LARGE, {True})])
def test_images_that_see_both_ways_are_planned_attested_and_checked(
    kind: str, in_windows: set[bool], tmp_path: Path
) -> None:
    save_tiny(tmp_path, kind)
    settings = msgspec.structs.replace(settings_of(tmp_path), layer_check=True, max_num_batched_tokens=80)
    built = built_engine(settings, proving)
    assert built.ready.layers.status is LayersStatus.PROVEN, built.ready.layers.detail
    planned = [row for row in built.ready.plan if row.phase in ("prefill", "extend", "decode")]
    spans = [row for row in planned if " spans" in row.shape]
    assert {row.phase for row in spans} == {"prefill", "extend"}
    assert {"window7" in row.shape for row in spans} == in_windows
    assert built.attested is not None
    assert built.attested.result == "match"
    # Of prompts one batch without, one with an image.
    assert [it.phase for it in built.attested.batches] == ["prefill", "extend", "decode", "prefill", "extend", TOWER]
    shadow = ShadowCheck(built.runner.dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True, rng=OfPrompts(0))
    built.runner.shadow = shadow
    answer(built, 1, num_tokens=1, height=6)
    report = shadow.judge()
    assert report is not None
    assert (report.phase, report.result) == ("prefill", "match"), report.detail


class OfPrompts(Random):
    """Draws whole prompts."""

    def choice(self, seq: Any) -> Any:
        return Phase.PREFILL if Phase.PREFILL in seq else super().choice(seq)


class Drawn(Random):
    """Draws the tower, and of its calls the one of `index`; then as any other."""

    def __init__(self) -> None:
        super().__init__(0)
        self.index: int | None = None

    def choice(self, seq: Any) -> Any:
        return TowerLane.TOWER if TowerLane.TOWER in seq else super().choice(seq)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        if self.index is not None:
            found, self.index = self.index, None
            return found
        return super().randrange(start, stop, step)


class Checks:
    """Shadow checks of an engine's tower."""

    def __init__(self, built: BuiltEngine) -> None:
        self.built = built
        self.rng = Drawn()
        self.check = ShadowCheck(
            built.runner.dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True, rng=self.rng
        )

    def report(self, seed: int, index: int) -> ShadowReport:
        """Answer a prompt whose image is checked: of the tower's calls the one of this index."""
        self.rng.index, self.built.runner.shadow = index, self.check
        ids, images = prompt_of(5, 6, image_of(seed, 4, 6, 14), 7)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        self.built.engine.submit(Submit(f"c{seed}", ids, sampling, images=images))
        found = None
        while self.built.engine.step() is not None:
            found = found or self.check.judge()
        self.built.runner.shadow = None
        assert found is not None
        return found
