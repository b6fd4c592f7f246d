"""Ling 2.6 as published: transformers' class of this model_type is Ling 3.0's, so that it is written here.

Source: modeling_bailing_moe_v2_5.py of github.com/inclusionAI/Ring-V2.5, whose names of tensors these are. It has no
cache, and computes lightning attention as the sum that its recurrence stands for.
"""

import math

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from support.models.bailing import BailingMoeV2Config, BailingMoeV2ForCausalLM, Norm, rotated


@strict
class BailingMoeV2_5Config(BailingMoeV2Config):
    model_type = "bailing_hybrid"
    layer_group_size: int = 5
    group_norm_size: int = 4
    linear_silu: bool = False
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    rope_interleave: bool = True
    partial_rotary_factor: float = 0.5
    score_function: str = "sigmoid"
    scoring_func: str = "sigmoid"
    seq_aux: bool = True
    topk_method: str = "noaux_tc"
    router_dtype: str = "fp32"


class GroupNorm(nn.Module):
    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.groups, self.eps = nn.Parameter(torch.ones(size)), groups, eps

    def forward(self, x: Tensor) -> Tensor:
        in_groups = x.view(len(x), self.groups, -1)
        normed = in_groups * torch.rsqrt(in_groups.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.flatten(1)


def slopes_of(num_heads: int) -> list[float]:
    """Return the slopes of heads, as the published file makes them."""
    if math.log2(num_heads).is_integer():
        start = 2 ** -(2 ** -(math.log2(num_heads) - 3))
        return [start * start**head for head in range(num_heads)]
    power = 2 ** math.floor(math.log2(num_heads))
    return slopes_of(power) + slopes_of(2 * power)[0::2][: num_heads - power]


class LightningAttention(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config, index: int) -> None:
        super().__init__()
        self.config = config
        size = config.num_attention_heads * config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, 3 * size, bias=config.use_qkv_bias)
        if config.use_qk_norm:
            self.query_layernorm = Norm(config.head_dim, config.rms_norm_eps)
            self.key_layernorm = Norm(config.head_dim, config.rms_norm_eps)
        self.g_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.g_norm = GroupNorm(size, config.group_norm_size, config.rms_norm_eps)
        self.dense = nn.Linear(size, config.hidden_size, bias=config.use_bias)
        self.share = 1 - (index - 1) / (config.num_hidden_layers - 1) + 1e-5  # of a head's slope

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        q, k, v = self.query_key_value(x).view(len(x), 3 * heads, dim).transpose(0, 1).split(heads)
        if self.config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        since = torch.arange(len(x))[:, None] - torch.arange(len(x))
        slopes = torch.tensor(slopes_of(heads)) * self.share
        decays = torch.exp(-slopes[:, None, None] * since.clamp(min=0)) * (since >= 0)
        out = (q @ k.transpose(1, 2) * dim**-0.5 * decays) @ v
        normed = self.g_norm(out.transpose(0, 1).flatten(1))
        found: Tensor = self.dense(normed * torch.sigmoid(self.g_proj(x)))
        return found


class LatentAttention(nn.Module):
    def __init__(self, config: BailingMoeV2_5Config) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.query_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * self.query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=config.use_qkv_bias)
            self.q_a_layernorm = Norm(config.q_lora_rank, 1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=config.use_qkv_bias
        )
        self.kv_a_layernorm = Norm(config.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.dense = nn.Linear(heads * config.v_head_dim, hidden, bias=config.use_qkv_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, num_tokens = self.config, len(x)
        made = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = made.view(num_tokens, -1, self.query_size).transpose(0, 1)
        q_plain, q_rotated = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).view(num_tokens, config.num_attention_heads, -1)
        k_plain, v = up.transpose(0, 1).split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        q_rotated, k_rotated = (rotated(_halves_of(it), cos, sin) for it in (q_rotated, k_rotated[None]))
        q = torch.cat((q_plain, q_rotated), dim=-1)
        k = torch.cat((k_plain, k_rotated.expand(len(k_plain), -1, -1)), dim=-1)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.query_size**-0.5 * self._grown
        )
        found: Tensor = self.dense(out.transpose(0, 1).flatten(1))
        return found

    @property
    def _grown(self) -> float:
        rope = self.config.rope_parameters or {}
        if not rope.get("mscale_all_dim") or rope.get("factor", 1.0) <= 1:
            return 1.0
        return float((0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2)


def _halves_of(heads: Tensor) -> Tensor:
    """Return heads with the first ones of all pairs of neighbours before the second ones."""
    return torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)


class BailingMoeV2_5ForCausalLM(BailingMoeV2ForCausalLM):
    config_class = BailingMoeV2_5Config

    def attention_of(self, index: int) -> nn.Module:
        config = self.config
        whole = config.num_hidden_layers // config.layer_group_size * config.layer_group_size
        is_latent = (index + 1) % config.layer_group_size == 0 or index >= whole
        return LatentAttention(config) if is_latent else LightningAttention(config, index)


AutoConfig.register("bailing_hybrid", BailingMoeV2_5Config, exist_ok=True)  # in place of Ling 3.0's
AutoModelForCausalLM.register(BailingMoeV2_5Config, BailingMoeV2_5ForCausalLM, exist_ok=True)
