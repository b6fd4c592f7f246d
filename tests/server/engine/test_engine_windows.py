"""The real engine on models of other families than Llama: greedy tokens against those of transformers."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from qualification.decision.decision import Policy
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, Settings
from support.engine.built_engine import built_engine
from support.engine.graph_session import attention_counts
from support.models.served_families import (
    FAMILIES,
    NUM_TOKENS,
    PROMPT_LENGTHS,
    WINDOW,
    family_model,
    prompts,
    qwen2_with_one_windowed_layer,
    reference_tokens,
    saved,
)


@dataclass(frozen=True)
class Served:
    rounds: list[list[list[int]]]  # tokens of each prompt, by round
    paths: set[str]
    windows: set[bool]  # whether an attention shape of the plan has one
    num_prefix_hit_tokens: int
    num_preemptions: int

    @property
    def tokens(self) -> list[list[int]]:
        return self.rounds[-1]


def serve(folder: Path, max_num_batched_tokens: int, num_rounds: int = 1, kv_cache_tokens: int = 512) -> Served:
    """All prompts through the engine at once; each round asks the same."""
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        max_model_len=min(128, kv_cache_tokens),
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=kv_cache_tokens,
        page_size=8,
        on_unproven=Policy.DEGRADE,  # measures nothing
        cache_dir=str(folder / "cache"),
    )
    built = built_engine(settings)
    paths: set[str] = set()
    num_hit, num_preempted, rounds = 0, 0, []
    for _ in range(num_rounds):
        for index, prompt in enumerate(prompts()):
            built.engine.submit(Submit(str(index), prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)))
        tokens: list[list[int]] = [[] for _ in PROMPT_LENGTHS]
        while built.engine.has_work:
            output = built.engine.step()
            assert output is not None
            paths |= {count.path for count in attention_counts(output)}
            num_hit += output.record.num_prefix_hit_tokens
            num_preempted += output.record.num_preemptions
            for delta in output.deltas:
                tokens[int(delta.request_id)] += delta.token_ids
        rounds.append(tokens)
    windows = {"window" in row.shape for row in built.ready.plan if row.head_dim is not None}
    return Served(rounds, paths, windows, num_hit, num_preempted)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "head_dim", "able"),
    [  # whole prompts; chunks shorter than the window; above 256 one path is left, otherwise the faster serves
        (64, 16, {"sdpa.cpu", "sdpa.math"}),
        (11, 16, {"sdpa.cpu", "sdpa.math"}),
        (11, 264, {"sdpa.math"}),
    ],
)
def test_a_windowed_mistral_is_served_as_by_transformers(
    max_num_batched_tokens: int, head_dim: int, able: set[str], tmp_path: Path
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


@pytest.mark.first
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_as_by_transformers(family: str, tmp_path: Path) -> None:
    """Batched, in chunks, and the second time behind a prefix that is found in the cache."""
    expected = reference_tokens(family_model(tmp_path, family))
    served = serve(tmp_path, 11, num_rounds=2)
    assert served.num_prefix_hit_tokens > 0
    # The first prompt is shorter than LongRoPE's original context, and is served for longer ones.
    start = 1 if "longrope" in family else 0
    for tokens in served.rounds:
        assert tokens[start:] == expected[start:]


@pytest.mark.parametrize("family", ["glm 4 lite", "mistral 4", "deepseek v3.2", "glm 5"])
def test_latents_of_preempted_sequences_are_computed_again(family: str, tmp_path: Path) -> None:
    expected = reference_tokens(family_model(tmp_path, family))
    served = serve(tmp_path, 11, kv_cache_tokens=72)  # for 86 tokens
    assert (served.num_preemptions > 0, served.tokens) == (True, expected)
