"""Real CUDA graphs: the tokens of an eager engine, counts that the profiler confirms, nothing compiled in service."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from graph_session import Session
from test_engine_windows import prompts, qwen2_with_one_windowed_layer, reference_tokens
from tiny_llama import NUM_LAYERS, NUM_TOKENS, TinyLlama
from torch.profiler import ProfilerActivity, profile

from qualification.decision import Policy
from server.engine.builder import BuiltEngine, build_engine
from server.settings import DeviceChoice, DtypeChoice, Settings

pytestmark = pytest.mark.gpu


def build(folder: Path, cache: Path, **settings: object) -> BuiltEngine:
    options = {"kv_cache_tokens": 4096, "cuda_graphs": True, "max_num_batched_tokens": 96, **settings}
    chosen = Settings(
        model=str(folder),
        device=DeviceChoice.CUDA,
        dtype=DtypeChoice.FP32,  # so that rounding moves no greedy token
        max_model_len=256,
        max_num_seqs=8,
        page_size=16,
        on_unproven=Policy.DEGRADE,
        cache_dir=str(cache),
        **options,  # type: ignore[arg-type]
    )
    return build_engine(chosen, frozenset(), lambda *_: None)


def num_replays(built: BuiltEngine) -> int:
    assert built.runner.graphs is not None
    return built.runner.graphs.num_replays


@pytest.mark.parametrize("batched_tokens", [96, 24])
def test_greedy_tokens_equal_those_of_transformers(tiny_llama: TinyLlama, tmp_path: Path, batched_tokens: int) -> None:
    built = build(tiny_llama.folder, tmp_path, max_num_batched_tokens=batched_tokens)
    session = Session(built.engine).submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    assert num_replays(built) >= NUM_TOKENS // 2


def test_tokens_are_those_of_an_engine_that_neither_replays_nor_runs_ahead(
    tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    found = []
    for is_graphed, runs_ahead in ((True, True), (True, False), (False, True), (False, False)):
        built = build(tiny_llama.folder, tmp_path, cuda_graphs=is_graphed, run_ahead=runs_ahead)
        assert (built.runner.graphs is not None) == is_graphed
        session = Session(built.engine).submit_all(tiny_llama.prompts, max_tokens=100).drain()  # over a bucket's edge
        session.submit_all(tiny_llama.prompts, temperature=0.8, top_p=0.9, seed=3, frequency_penalty=0.2).drain()
        found.append(session.all_tokens(len(tiny_llama.prompts)))
    assert found[1:] == found[:1] * 3


def test_a_sequence_alone_has_the_tokens_it_has_among_neighbours(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = Session(build(tiny_llama.folder, tmp_path).engine)
    for index, prompt in enumerate(tiny_llama.prompts):
        session.submit(f"r{index}", prompt)
        session.drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy


def test_preemption_changes_no_token(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama.folder, tmp_path, kv_cache_tokens=272)
    session = Session(built.engine).submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    assert session.total("num_preemptions") > 0
    assert num_replays(built) > 0


def test_cancelled_neighbours_change_no_token(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = Session(build(tiny_llama.folder, tmp_path).engine)
    for index, prompt in enumerate(tiny_llama.prompts[:4]):
        session.submit(f"doomed{index}", prompt[::-1])
        session.submit(f"r{index}", prompt)
    for index in range(4):
        for _ in range(3):
            session.step()
        session.engine.cancel(f"doomed{index}")
    assert session.drain().all_tokens(4) == tiny_llama.greedy[:4]


def test_launches_are_layers_times_steps_and_the_profiler_agrees(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama.folder, tmp_path)
    session = Session(built.engine)
    session.submit("a", tiny_llama.prompts[3])
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        session.drain()
        torch.cuda.synchronize()
    assert session.launches() == {
        ("prefill", "triton.prefill"): NUM_LAYERS,
        ("decode", "triton.decode"): (NUM_TOKENS - 1) * NUM_LAYERS,
    }
    assert num_replays(built) == NUM_TOKENS
    seen = Counter(event.name for event in profiler.events())
    assert seen["hallmark_prefill"] == NUM_LAYERS
    assert seen["hallmark_decode"] == (NUM_TOKENS - 1) * NUM_LAYERS


def test_service_compiles_nothing(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama.folder, tmp_path)
    session = Session(built.engine)
    for count in (1, 2, 3, 6):
        session.submit_all(tiny_llama.prompts[:count], temperature=0.5 * (count % 2)).drain()
    assert session.total("num_compiles") == 0
    assert num_replays(built) > 3 * (NUM_TOKENS - 2)


def test_a_graph_holds_layers_with_and_without_a_window(tmp_path: Path) -> None:
    model = qwen2_with_one_windowed_layer()
    model.save_pretrained(tmp_path)
    built = build(tmp_path, tmp_path / "cache")
    session = Session(built.engine).submit_all(prompts(), max_tokens=12).drain()
    assert session.all_tokens(3) == reference_tokens(model)
    assert num_replays(built) >= 10
    decode = [count for output in session.outputs for count in output.record.dispatches if count.phase == "decode"]
    assert {count.num_launches for count in decode} == {1}  # a layer for each of the two decisions
