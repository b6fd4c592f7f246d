"""Real CUDA graphs: the tokens of an eager engine, counts that the profiler confirms, nothing compiled in service."""

from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernels.vocabulary.shape import Phase
from server.engine.execution.step_writer import StepWriter
from server.engine.scheduling.sequence import Batch, Sequence, phase_of
from server.engine.startup.builder import BuiltEngine
from server.protocol.messages import SamplingParams
from server.settings import DtypeChoice
from support.engine.built_engine import gpu_engine
from support.engine.graph_session import Session
from support.models.served_families import family_model, prompts, qwen2_with_one_windowed_layer, reference_tokens
from support.models.tiny_llama import NAN_TOKEN, NUM_LAYERS, NUM_TOKENS, TinyLlama

pytestmark = pytest.mark.gpu


def build(folder: Path, cache: Path, **settings: object) -> BuiltEngine:
    options = {
        "dtype": DtypeChoice.FP32,  # so that rounding moves no greedy token
        "cuda_graphs": True,
        "max_num_batched_tokens": 96,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "page_size": 16,
        **settings,
    }
    return gpu_engine(folder, cache, **options)


def num_replays(built: BuiltEngine) -> int:
    assert built.runner.graphs is not None
    return built.runner.graphs.num_replays


@pytest.mark.parametrize("batched_tokens", [96, 24])
def test_greedy_tokens_equal_those_of_transformers(tiny_llama: TinyLlama, tmp_path: Path, batched_tokens: int) -> None:
    built = build(tiny_llama.folder, tmp_path, max_num_batched_tokens=batched_tokens)
    session = Session(built.engine).submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    assert num_replays(built) >= NUM_TOKENS // 2


def test_tokens_equal_those_of_an_engine_without_graphs(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    found = []
    for is_graphed, runs_ahead in ((True, True), (True, False), (False, True), (False, False)):
        built = build(tiny_llama.folder, tmp_path, cuda_graphs=is_graphed, run_ahead=runs_ahead)
        assert (built.runner.graphs is not None) == is_graphed
        session = Session(built.engine).submit_all(tiny_llama.prompts, max_tokens=100).drain()  # over a bucket's edge
        session.submit_all(tiny_llama.prompts, temperature=0.8, top_p=0.9, seed=3, frequency_penalty=0.2).drain()
        found.append(session.all_tokens(len(tiny_llama.prompts)))
    assert found[1:] == found[:1] * 3


def test_a_sequence_has_the_same_tokens_among_neighbours(tiny_llama: TinyLlama, tmp_path: Path) -> None:
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


def test_the_profiler_sees_layers_times_steps_launches(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama.folder, tmp_path)
    session, num_attested = Session(built.engine), num_replays(built)
    session.submit("a", tiny_llama.prompts[3])
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        session.drain()
        torch.cuda.synchronize()
    assert session.launches() == {
        ("prefill", "triton.prefill"): NUM_LAYERS,
        ("decode", "triton.decode"): (NUM_TOKENS - 1) * NUM_LAYERS,
    }
    assert num_replays(built) - num_attested == NUM_TOKENS
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
    model = qwen2_with_one_windowed_layer(tmp_path)
    built = build(tmp_path, tmp_path / "cache")
    session = Session(built.engine).submit_all(prompts(), max_tokens=12).drain()
    assert session.all_tokens(3) == reference_tokens(model)
    assert num_replays(built) >= 10
    decode = [count for output in session.outputs for count in output.record.dispatches if count.phase == "decode"]
    assert {count.num_launches for count in decode} == {1}  # a layer for each of the two decisions


@pytest.mark.parametrize("family", ["qwen 3 moe", "qwen 2 moe", "mixtral", "gpt-oss", "glm"])
@pytest.mark.parametrize("batched_tokens", [96, 11])
def test_mixtures_of_experts_are_served_by_graphs(family: str, batched_tokens: int, tmp_path: Path) -> None:
    model = family_model(tmp_path, family)
    built = build(tmp_path, tmp_path / "cache", max_model_len=128, max_num_batched_tokens=batched_tokens)
    num_tokens = len(reference_tokens(model)[0])
    session = Session(built.engine).submit_all(prompts(), max_tokens=num_tokens).drain()
    assert session.all_tokens(3) == reference_tokens(model)
    assert num_replays(built) >= num_tokens - 1
    assert session.total("num_compiles") == 0


def batch_of(rows: list[tuple[int, int]], page_size: int) -> Batch:
    """Rows of (query_len, context_len) in the order of phases, each with pages of its own."""
    generator = torch.Generator().manual_seed(len(rows))
    sequences, tables, num_pages = [], [], 0
    for _, context_len in rows:
        tokens = torch.randint(0, NAN_TOKEN, (context_len,), generator=generator).tolist()
        sequences.append(Sequence("", tokens, context_len, SamplingParams(max_tokens=1, temperature=0.0), 0, 0.0))
        tables.append(array("i", range(num_pages, num_pages + -(-context_len // page_size))))
        num_pages += len(tables[-1])
    phases = [phase_of(*row) for row in rows]
    return Batch(
        tuple(sequences),
        tuple(query_len for query_len, _ in rows),
        tuple(context_len for _, context_len in rows),
        tuple(tables),
        tuple(range(len(rows))),
        num_prefill=phases.count(Phase.PREFILL),
        num_extend=phases.count(Phase.EXTEND),
    )


@torch.inference_mode()
def test_hopper_paths_compute_in_a_graph_as_outside(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    built = build(tiny_llama.folder, tmp_path, dtype=DtypeChoice.BF16, max_num_batched_tokens=256)
    runner, graphs = built.runner, built.runner.graphs
    assert graphs is not None
    writer = StepWriter(page_size=16, num_pages=runner.num_pages, is_pinned=True)
    served = set()
    for rows in (
        [(1, 1)],
        [(100, 100), (3, 3), (90, 90)],
        [(60, 60), (1, 70), (1, 200)],
        [(17, 50)],
        [(5, 130), (40, 41), (1, 9), (1, 256)],
    ):
        batch = batch_of(rows, page_size=16)
        prompts = [row for row in rows if phase_of(*row) is not Phase.DECODE]
        runner.launch(batch_of([(length, length) for _, length in prompts], 16)).result()  # what chunks look back on
        step = graphs.find(batch)
        assert step is not None
        runner.launch(batch).result()
        assert runner.worker.graph_logits is not None
        replayed = runner.worker.graph_logits[list(step.rows)].clone()
        served |= {choice.use.path for choice in step.attention.choices}
        ends = torch.tensor(batch.query_lens).cumsum(0)[list(batch.sampled_rows)] - 1
        hidden = runner.worker.launch(writer.write(batch, {}))
        eager = runner.worker.decoder.logits(hidden[ends.to(hidden.device)])
        assert eager.isfinite().all()
        assert (replayed - eager).abs().max() <= 0.05 * eager.abs().max()  # padding may change how cuBLAS adds up
    assert {"gluon.prefill.hopper", "gluon.extend.hopper"} <= served


def test_prompts_of_a_shared_beginning_have_their_own_tokens(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama.folder, tmp_path)
    session, num_attested = Session(built.engine), num_replays(built)
    longest = tiny_llama.prompts[5]
    for index, prompt in enumerate((longest, longest[:60], longest)):
        session.submit(f"r{index}", prompt)
        session.drain()
    assert session.tokens("r0") == session.tokens("r2") == tiny_llama.greedy[5]
    assert ("extend", "triton.extend") in session.launches()
    assert num_replays(built) - num_attested == len(session.outputs)


@pytest.mark.timed  # alone: the memory of other tests is not free
def test_the_cache_takes_the_memory_it_may(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama.folder, tmp_path, kv_cache_tokens=None, gpu_memory_utilization=0.3)
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4  # k and v, layers, tokens, heads, head dim, fp32
    assert 1 << 30 < built.ready.num_pages * page_bytes < 100 << 30
