"""M-RoPE, Qwen2.5-VL's position triples: they turn queries and keys, and attention stays causal by token order."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLAttention,
    Qwen2_5_VLRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kernels.functional import attention_varlen

SECTION = [4, 6, 6]
HEADS, KV_HEADS, HEAD_DIM = 7, 1, 32


def triples(num_text: int, height: int, width: int) -> torch.Tensor:
    """[3, 1, tokens]: text, an image of height x width that stands still in time, and text again."""
    text = torch.arange(num_text).expand(3, -1)
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = num_text + torch.stack([torch.zeros(height * width), row.flatten(), column.flatten()]).long()
    after = int(image.max()) + 1 + torch.arange(num_text).expand(3, -1)
    return torch.cat([text, image, after], dim=1)[:, None]


@pytest.fixture(scope="module")
def layer() -> Qwen2_5_VLAttention:
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": HEADS * HEAD_DIM,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTION},
        },
        attn_implementation="eager",
    ).text_config
    return Qwen2_5_VLAttention(config, layer_idx=0).eval()


@torch.inference_mode()
def test_our_causal_attention_is_the_models_on_position_triples(layer: Qwen2_5_VLAttention) -> None:
    positions = triples(9, 5, 7)
    num_tokens = positions.shape[-1]
    hidden = torch.randn(1, num_tokens, HEADS * HEAD_DIM)
    cos, sin = Qwen2_5_VLRotaryEmbedding(layer.config)(hidden, positions)
    blind = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)[None, None]
    wanted, _ = layer(hidden, attention_mask=blind, position_embeddings=(cos, sin))

    q, k, v = (
        projection(hidden).view(1, num_tokens, -1, HEAD_DIM).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32)
    out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, num_tokens, num_tokens)
    torch.testing.assert_close(layer.o_proj(out.flatten(1))[None], wanted, rtol=1e-4, atol=1e-5)
