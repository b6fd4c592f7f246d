"""The real engine on a tiny Llama, in this process: tokens against transformers', launches against layers x steps."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from server.engine.startup.limits import choose_limits
from server.errors import SettingsError
from server.model.load.load import load_config
from server.protocol.messages import FinishReason, Fork
from server.protocol.plan_rows import counted_bucket
from server.settings import Settings
from support.engine.graph_session import Session, attention_counts
from support.engine.llama_engine import build, session_of
from support.models.tiny_llama import NAN_TOKEN, NUM_LAYERS, NUM_TOKENS, TinyLlama


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 11}, {"kv_cache_tokens": 144, "page_size": 8}], ids=str
)
def test_greedy_tokens_of_a_batch_equal_those_of_transformers(
    tiny_llama: TinyLlama, tmp_path: Path, settings: dict[str, int]
) -> None:
    """Prompts whole, in chunks beside decode rows, and preempted."""
    session = session_of(tiny_llama, tmp_path, **settings).submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    phases = [{count.phase for count in attention_counts(output)} for output in session.outputs]
    assert ({"prefill", "extend", "decode"} in phases) >= ("max_num_batched_tokens" in settings)
    assert (session.total("num_preemptions") > 0) == ("kv_cache_tokens" in settings)
    assert session.outputs[-1].record.num_pages_used == 0


def num_prompt_tokens(session: Session) -> int:
    """Tokens of prompts that were computed, by the records of the steps."""
    return sum(count.num_tokens for count in attention_counts(*session.outputs) if count.phase != "decode")


@pytest.mark.parametrize(("batched", "caches"), [(11, True), (2048, False)])
def test_eight_answers_to_a_prompt_compute_it_once(
    tiny_llama: TinyLlama, tmp_path: Path, batched: int, caches: bool
) -> None:
    """The answers' tokens are those of eight requests with their seeds, each on a server of its own."""
    prompt, options = (
        [*tiny_llama.prompts[3], 9, 8, 7] * 2,
        {"max_num_batched_tokens": batched, "prefix_caching": caches},
    )
    sampling = {"max_tokens": 6, "temperature": 1.0}
    alone = session_of(tiny_llama, tmp_path, **{**options, "prefix_caching": False})
    for seed in range(8):
        alone.submit(f"r{seed}", prompt, **sampling, seed=seed)
        alone.drain()
    together = session_of(tiny_llama, tmp_path, **options)
    forks = [Fork(f"r{seed}", seed) for seed in range(1, 8)]
    together.submit("r0", prompt, forks=forks, **sampling, seed=0)
    together.drain()
    assert num_prompt_tokens(together) == len(prompt) == num_prompt_tokens(alone) / 8
    answers = together.all_tokens(8)
    assert answers == alone.all_tokens(8)
    assert len(set(map(tuple, answers))) == 8


def test_attention_launches_are_layers_times_steps_by_phase(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = session_of(tiny_llama, tmp_path, max_num_batched_tokens=32)
    session.submit("a", tiny_llama.prompts[5])  # 71 tokens: chunks of 32, 32 and 7, then 19 single tokens
    launches = [(phase, num) for (phase, _), num in session.drain().launches().items()]
    due = [("prefill", NUM_LAYERS), ("extend", 2 * NUM_LAYERS), ("decode", (NUM_TOKENS - 1) * NUM_LAYERS)]
    assert sorted(launches) == sorted(due)  # a phase has one path


def test_bad_logits_end_one_request_and_poison_no_page(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = session_of(tiny_llama, tmp_path, kv_cache_tokens=160)
    session.submit("sick", [NAN_TOKEN] * 100)
    session.submit("well", tiny_llama.prompts[2])
    session.drain()
    last = [delta for output in session.outputs for delta in output.deltas if delta.request_id == "sick"][-1]
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, "nonfinite_logits")
    assert session.total("num_nonfinite") == 1
    assert session.tokens("well") == tiny_llama.greedy[2]
    session.submit("heir", tiny_llama.prompts[5])  # on the pages that still hold NaN
    session.drain()
    assert session.tokens("heir") == tiny_llama.greedy[5]


def test_a_stop_token_waits_for_the_least_number_of_tokens(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = session_of(tiny_llama, tmp_path)
    stop = tiny_llama.greedy[3][0]
    session.submit("at once", tiny_llama.prompts[3], stop_token_ids=(stop,))
    session.submit("later", tiny_llama.prompts[3], stop_token_ids=(stop,), min_tokens=5)
    session.drain()
    assert session.tokens("at once") == [stop]
    assert len(session.tokens("later")) >= 5
    assert stop not in session.tokens("later")[:5]


def test_the_plan_that_is_reported_is_the_plan_that_serves(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama, tmp_path, max_num_batched_tokens=32)
    rows: dict[tuple[str, str], set[tuple[str | None, str, str]]] = defaultdict(set)
    for row in built.ready.plan:
        rows[row.phase, counted_bucket(row.phase, row.context_bucket)].add((row.path, row.status, row.wanted))
    session = Session(built.engine)
    session.submit("a", tiny_llama.prompts[5])
    session.drain()
    for output in session.outputs:
        for count in output.record.dispatches:
            assert rows[count.phase, count.bucket] == {(count.path, count.status, count.wanted)}
    assert built.ready.attention_layers == NUM_LAYERS


@pytest.mark.parametrize("name", ["max_model_len", "kv_cache_tokens"])
def test_settings_that_cannot_work_name_limit_and_value(tiny_llama: TinyLlama, tmp_path: Path, name: str) -> None:
    value = {"max_model_len": 257, "kv_cache_tokens": 100}[name]
    with pytest.raises(SettingsError, match=r"257.*256|96 tokens.*128"):
        build(tiny_llama, tmp_path, **{name: value})


def test_a_cache_that_no_memory_holds_is_refused_and_not_tried(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--kv-cache-tokens asks for \d+\.\d GiB, the device has \d+\.\d GiB"):
        build(tiny_llama, tmp_path, kv_cache_tokens=10**15)


def test_a_step_on_a_cpu_beats_around_each_layers_attention(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """A step that takes minutes is then no hang, and one that stands still is heard of no more."""
    built = build(tiny_llama, tmp_path)
    beats: list[int] = []
    built.runner.worker.beat = lambda: beats.append(built.engine.step_index)
    session = Session(built.engine).submit_all(tiny_llama.prompts[:1]).drain()
    assert session.all_tokens(1) == tiny_llama.greedy[:1]
    assert {beats.count(step) for step in set(beats)} == {2 * NUM_LAYERS}
    assert built.ready.longest_silence_s > 0


def test_a_long_prompt_on_a_cpu_is_cut_by_the_keys_it_attends_to(tiny_llama: TinyLlama) -> None:
    config = load_config(tiny_llama.folder)
    limits = choose_limits(Settings(model=str(tiny_llama.folder)), config, torch.device("cpu"))
    attention = config.layers[0].attention
    # 4 operations for each key and each number of a query: 17 billion, which busy cores manage in seconds.
    assert limits.max_attended_keys == 2**34 // (4 * attention.num_heads * attention.head_dim)
    assert choose_limits(Settings(model=str(tiny_llama.folder)), config, torch.device("cuda")).max_attended_keys is None
