"""An engine on a GPU whose products of many rows are measured before ready: it attests, and the next start agrees."""

import json
from pathlib import Path

import pytest

from server.engine.startup.builder import BuiltEngine
from server.settings import LoadFormat
from support.engine.built_engine import gpu_engine
from support.engine.graph_session import Session

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def build(folder: Path) -> BuiltEngine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return gpu_engine(
        folder,
        folder / "cache",
        load_format=LoadFormat.DUMMY,
        max_model_len=4096,
        max_num_seqs=96,
        max_num_batched_tokens=3072,
        kv_cache_tokens=32768,
        prefix_caching=False,
        choose_matmuls=True,
    )


def tokens(built: BuiltEngine) -> list[list[int]]:
    """Return tokens of prompts alone and together: decode steps of 90 rows, prompts of 2,300 tokens without a graph."""
    session = Session(built.engine)
    prompts = [[3 + (index * 31 + at * 17) % 8000 for at in range(20 + index)] for index in range(90)]
    session.submit_all(prompts).drain()
    session.submit("long", [3 + at % 8000 for at in range(2300)])
    return [*session.drain().all_tokens(len(prompts)), session.tokens("long")]


def test_an_engine_serves_and_attests_alike_after_a_restart(tmp_path: Path) -> None:
    built = build(tmp_path)
    kept = list((tmp_path / "cache").glob("products-*.json"))
    assert len(kept) == 1
    measured = kept[0].read_bytes()
    assert len(json.loads(measured)["algorithms"]) == 5
    assert built.ready.matmul_fallbacks == {}
    assert built.attested is not None
    assert built.attested.result != "mismatch"
    assert built.attested.quarantined == []
    found = tokens(built)
    assert sum(len(each) for each in found) > 20 * len(found) // 2  # some may end early
    assert tokens(build(tmp_path)) == found
    assert kept[0].read_bytes() == measured
