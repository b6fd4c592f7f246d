"""Ling 2.0 as published: transformers lacks the class, so that it is written here from the published definition.

Source: modeling_bailing_moe_v2.py of github.com/inclusionAI/Ling-V2, whose names of tensors these are. It has no cache.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@strict
class BailingMoeV2Config(PreTrainedConfig):  # type: ignore[misc]
    model_type = "bailing_moe_v2"
    default_theta = 600_000.0
    use_cache: bool = False
    vocab_size: int = 157_184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_bias: bool = False
    rms_norm_eps: float = 1e-6
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    output_dropout: float = 0.0
    initializer_range: float = 0.02
    max_position_embeddings: int = 32_768
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    max_window_layers: int = 20
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    head_dim: int = 128
    use_qk_norm: bool = True
    num_nextn_predict_layers: int = 0
    mtp_loss_scaling_factor: float = 0.0
    moe_router_enable_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    output_router_logits: bool = False
    tie_word_embeddings: bool = False


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Gate(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * 0.3)
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight of each expert [T, experts], of x [T, hidden]: 0 for those that are not visited."""
        scores = torch.sigmoid(x @ self.weight.T)
        assert isinstance(self.expert_bias, Tensor)
        routed = scores + self.expert_bias
        groups = routed.view(len(x), self.config.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.config.topk_group, dim=-1).indices
        is_best = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
        masked = groups.masked_fill(~is_best[:, :, None], float("-inf")).flatten(1)
        chosen = masked.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(1, chosen, weights * self.config.routed_scaling_factor)


class Mixture(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(FeedForward(hidden, width) for _ in range(config.num_experts))
        self.shared_experts = FeedForward(hidden, width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x)
        added = torch.stack([weights[:, [index]] * expert(x) for index, expert in enumerate(self.experts)]).sum(0)
        found: Tensor = added + self.shared_experts(x)
        return found


class Attention(nn.Module):
    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.query_key_value = nn.Linear(
            config.hidden_size, (heads + 2 * kv_heads) * head_dim, bias=config.use_qkv_bias
        )
        self.dense = nn.Linear(heads * head_dim, config.hidden_size, bias=config.use_bias)
        if config.use_qk_norm:
            self.query_layernorm = Norm(head_dim, config.rms_norm_eps)
            self.key_layernorm = Norm(head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = self.query_key_value(x).view(len(x), heads + 2 * kv_heads, self.config.head_dim).transpose(0, 1)
        q, k, v = qkv.split([heads, kv_heads, kv_heads])
        if self.config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (it.repeat_interleave(heads // kv_heads, dim=0) for it in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.dense(out.transpose(0, 1).flatten(1))
        return found


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((rotated * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


class Layer(nn.Module):
    def __init__(self, config: BailingMoeV2Config, index: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        is_dense = index < config.first_k_dense_replace
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size) if is_dense else Mixture(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Decoder(nn.Module):
    def __init__(self, config: BailingMoeV2Config, attention_of: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, it, attention_of(it)) for it in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the normed residual [T, hidden] of one sequence [T]."""
        each, scale = frequencies(self.config)
        angles = torch.arange(len(input_ids))[:, None] * each
        angles = torch.cat((angles, angles), dim=-1)
        x = self.word_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, angles.cos() * scale, angles.sin() * scale)
        found: Tensor = self.norm(x)
        return found


def frequencies(config: BailingMoeV2Config) -> tuple[Tensor, float]:
    """Return the angle of a step of each pair [pairs], and what cosines and sines are multiplied by."""
    rope = config.rope_parameters or {}
    share = rope.get("partial_rotary_factor", config.partial_rotary_factor)
    if rope["rope_type"] == "default":
        size = int(config.head_dim * share)
        return rope["rope_theta"] ** -(torch.arange(0, size, 2) / size), 1.0
    of_kind = type(config)(**{**config.to_dict(), "rope_parameters": {**rope, "partial_rotary_factor": share}})
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](of_kind, torch.device("cpu"))
    return frequencies, scale


class BailingMoeV2ForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    config_class = BailingMoeV2Config
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__(config)
        self.model = Decoder(config, self.attention_of)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def attention_of(self, _index: int) -> nn.Module:
        return Attention(self.config)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """Return logits [1, T, vocab] of one sequence [1, T]."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids[0]))[None])


AutoConfig.register("bailing_moe_v2", BailingMoeV2Config)
AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM)
