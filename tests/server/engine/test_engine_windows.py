"""The real engine on models of other families than Llama: greedy tokens against those of transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qualification.decision.decision import Policy
from server.engine.startup.builder import build_engine
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, Settings

WINDOW = 12
NUM_TOKENS = 12
PROMPT_LENGTHS = (1, 9, 40)  # below the window; crossing it while decoding; beyond it
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,  # large, so that the best token leads by far more than rounding can move
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Served:
    tokens: list[list[int]]  # of each prompt
    paths: set[str]
    windows: set[bool]  # whether an attention shape of the plan has one
    num_prefix_hit_tokens: int = 0


def mistral(head_dim: int, window: int | None = WINDOW) -> PreTrainedModel:
    torch.manual_seed(7)
    config = MistralConfig(**{**TINY, "head_dim": head_dim, "sliding_window": window})
    return MistralForCausalLM(config).eval()


def qwen2_with_one_windowed_layer() -> PreTrainedModel:
    torch.manual_seed(7)
    return Qwen2ForCausalLM(Qwen2Config(**TINY, use_sliding_window=True, max_window_layers=1)).eval()


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
    built = build_engine(settings, frozenset(), lambda *_: None)
    paths: set[str] = set()
    num_hit = 0
    for _ in range(num_rounds):
        for index, prompt in enumerate(prompts()):
            built.engine.submit(Submit(str(index), prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)))
        tokens: list[list[int]] = [[] for _ in PROMPT_LENGTHS]
        while built.engine.has_work:
            output = built.engine.step()
            assert output is not None
            paths |= {str(count.path) for count in output.record.dispatches}
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
    model = mistral(head_dim)
    model.save_pretrained(tmp_path)
    served = serve(tmp_path, max_num_batched_tokens)
    assert served.tokens == reference_tokens(model)
    assert served.paths
    assert served.paths <= able
    assert served.windows == {True}


def test_layers_with_and_without_a_window_are_served_as_by_transformers(tmp_path: Path) -> None:
    model = qwen2_with_one_windowed_layer()
    model.save_pretrained(tmp_path)
    served = serve(tmp_path, 11)
    assert served.tokens == reference_tokens(model)
    assert served.windows == {True, False}


def test_the_comparison_sees_the_window() -> None:
    with_window, without = mistral(16), mistral(16, None)
    assert reference_tokens(with_window)[2] != reference_tokens(without)[2]


GEMMA = {**TINY, "head_dim": 16, "query_pre_attn_scalar": 9}
NO_WINDOW = {**TINY, "sliding_window": None}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
PART = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "original_max_position_embeddings": 8}
FACTORS = {"short_factor": [1.0 + n / 9 for n in range(6)], "long_factor": [2.0 + n for n in range(6)]}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    # No path of a CPU has a softcap of scores: that is shown by the decoder's own tests, and on a GPU.
    "gemma 2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GEMMA, attn_logit_softcapping=None, final_logit_softcapping=3.0)
    ),
    "gemma 3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, sliding_window_pattern=2)),
    "olmo 2": lambda: Olmo2ForCausalLM(Olmo2Config(**NO_WINDOW)),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(**NO_WINDOW, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6)
    ),
    "qwen 3 moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**NO_WINDOW, **EXPERTS, head_dim=16, mlp_only_layers=[0], norm_topk_prob=True)
    ),
    "qwen 2 moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**NO_WINDOW, **EXPERTS, shared_expert_intermediate_size=28)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=5, num_experts_per_tok=1)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**TINY, num_local_experts=5, num_experts_per_tok=5, head_dim=16)),
    "glm": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **NO_WINDOW,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            n_group=4,
            topk_group=2,
            head_dim=16,
        )
    ),
    "phi 3, longrope": lambda: Phi3ForCausalLM(
        Phi3Config(**NO_WINDOW, rope_parameters={**PART, **FACTORS}, original_max_position_embeddings=8)
    ),
}


def family_model(family: str) -> PreTrainedModel:
    torch.manual_seed(7)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_as_by_transformers(family: str, tmp_path: Path) -> None:
    """Alone, batched, in chunks, and behind a prefix that was found in the cache."""
    model = family_model(family)
    model.save_pretrained(tmp_path)
    expected = reference_tokens(model)
    for max_num_batched_tokens, max_num_seqs, num_rounds in ((64, 1, 1), (64, 4, 1), (11, 4, 2)):
        served = serve(tmp_path, max_num_batched_tokens, max_num_seqs, num_rounds)
        assert (served.num_prefix_hit_tokens > 0) == (num_rounds > 1)
        # The first prompt is shorter than LongRoPE's original context, and is served for longer ones.
        start = 1 if "longrope" in family else 0
        assert served.tokens[start:] == expected[start:]
