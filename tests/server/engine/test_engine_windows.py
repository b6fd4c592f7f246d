"""The real engine on models of other families than Llama: greedy tokens against those of transformers."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from built_engine import built_engine
from graph_session import attention_counts
from tiny_families import GEMMA, GLM, MIXTRAL, QWEN_2_MOE, QWEN_3_MOE, longrope, save_reference
from transformers import PreTrainedModel

from qualification.decision.decision import Policy
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, Settings

WINDOW = 12
NUM_TOKENS = 12
PROMPT_LENGTHS = (1, 9, 40)  # below the window; crossing it while decoding; beyond it
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PART = {**longrope(6), "partial_rotary_factor": 0.75, "original_max_position_embeddings": 8}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    # No path of a CPU has a softcap of scores: that is shown by the decoder's own tests, and on a GPU.
    "gemma 2": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": 9.0}),
    "gemma 3": ("gemma3", {**GEMMA, "sliding_window_pattern": 2}),
    "olmo 2": ("olmo2", {}),
    "granite": (
        "granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6}
    ),
    "qwen 3 moe": ("qwen3_moe", {**QWEN_3_MOE, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen 2 moe": ("qwen2_moe", QWEN_2_MOE),
    "mixtral": ("mixtral", {**MIXTRAL, "num_experts_per_tok": 1, "sliding_window": WINDOW}),
    "gpt-oss": (
        "gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 5, "head_dim": 16, "sliding_window": WINDOW}
    ),
    "glm": ("glm4_moe", {**GLM, "head_dim": 16, "n_group": 4, "topk_group": 2}),
    "phi 3, longrope": ("phi3", {"rope_parameters": PART, "original_max_position_embeddings": 8}),
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    tokens: list[list[int]]  # of each prompt
    paths: set[str]
    windows: set[bool]  # whether an attention shape of the plan has one
    num_prefix_hit_tokens: int = 0


def saved(folder: Path, family: str, **changes: object) -> PreTrainedModel:
    return save_reference(folder, family, {**SIZES, **changes})


def family_model(folder: Path, family: str) -> PreTrainedModel:
    """Save a model of FAMILIES."""
    name, changes = FAMILIES[family]
    return saved(folder, name, **changes)


def qwen2_with_one_windowed_layer(folder: Path) -> PreTrainedModel:
    return saved(folder, "qwen2", sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def reference_tokens(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(output[0, len(prompt) :].tolist())
    return found


def serve(folder: Path, max_num_batched_tokens: int, max_num_seqs: int = 4, num_rounds: int = 1) -> Served:
    """All prompts through the engine, by default at once. Each round asks the same; the tokens are the last one's."""
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=512,
        page_size=8,
        on_unproven=Policy.DEGRADE,  # measures nothing
        cache_dir=str(folder / "cache"),
    )
    built = built_engine(settings)
    paths: set[str] = set()
    num_hit = 0
    for _ in range(num_rounds):
        for index, prompt in enumerate(prompts()):
            built.engine.submit(Submit(str(index), prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)))
        tokens: list[list[int]] = [[] for _ in PROMPT_LENGTHS]
        while built.engine.has_work:
            output = built.engine.step()
            assert output is not None
            paths |= {count.path for count in attention_counts(output)}
            num_hit += output.record.num_prefix_hit_tokens
            for delta in output.deltas:
                tokens[int(delta.request_id)] += delta.token_ids
    return Served(
        tokens, paths, {"window" in row.shape for row in built.ready.plan if row.head_dim is not None}, num_hit
    )


@pytest.mark.parametrize("max_num_batched_tokens", [64, 11])  # whole prompts; chunks shorter than the window
@pytest.mark.parametrize(
    ("head_dim", "able"),
    [(16, {"sdpa.cpu", "sdpa.math"}), (264, {"sdpa.math"})],  # the faster serves; above 256 one is left
)
def test_a_windowed_mistral_is_served_as_by_transformers(
    head_dim: int, able: set[str], max_num_batched_tokens: int, tmp_path: Path
) -> None:
    model = saved(tmp_path, "mistral", head_dim=head_dim, sliding_window=WINDOW)
    served = serve(tmp_path, max_num_batched_tokens)
    assert served.tokens == reference_tokens(model)
    assert served.paths
    assert served.paths <= able
    assert served.windows == {True}


def test_windows_of_some_layers_are_served_as_by_transformers(tmp_path: Path) -> None:
    model = qwen2_with_one_windowed_layer(tmp_path)
    served = serve(tmp_path, 11)
    assert served.tokens == reference_tokens(model)
    assert served.windows == {True, False}


def test_the_comparison_sees_the_window(tmp_path: Path) -> None:
    with_window, without = (saved(tmp_path, "mistral", head_dim=16, sliding_window=window) for window in (WINDOW, None))
    assert reference_tokens(with_window)[2] != reference_tokens(without)[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_as_by_transformers(family: str, tmp_path: Path) -> None:
    """Alone, batched, in chunks, and behind a prefix that was found in the cache."""
    model = family_model(tmp_path, family)
    expected = reference_tokens(model)
    for max_num_batched_tokens, max_num_seqs, num_rounds in ((64, 1, 1), (64, 4, 1), (11, 4, 2)):
        served = serve(tmp_path, max_num_batched_tokens, max_num_seqs, num_rounds)
        assert (served.num_prefix_hit_tokens > 0) == (num_rounds > 1)
        # The first prompt is shorter than LongRoPE's original context, and is served for longer ones.
        start = 1 if "longrope" in family else 0
        assert served.tokens[start:] == expected[start:]
