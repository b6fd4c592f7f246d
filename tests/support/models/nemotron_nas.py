"""Llama-Nemotron as published: transformers lacks the class, so that it is written here of Llama's parts."""

from copy import deepcopy
from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

Block = dict[str, dict[str, Any]]


@strict
class DeciLMConfig(LlamaConfig):  # type: ignore[misc]
    """A Llama's, with what each layer has of its own."""

    model_type = "nemotron-nas"
    block_configs: list[Block] = field(default_factory=list)
    use_cache: bool = False


class DeciLMLayer(nn.Module):
    """A layer of Llama without the parts that its block leaves out."""

    def __init__(self, config: DeciLMConfig, index: int) -> None:
        super().__init__()
        block, own = config.block_configs[index], deepcopy(config)
        self.attends, self.feeds = (not block[part].get("no_op", False) for part in ("attention", "ffn"))
        if self.attends:
            own.num_key_value_heads = config.num_attention_heads // block["attention"]["n_heads_in_group"]
        if self.feeds:
            width = int(2 * block["ffn"]["ffn_mult"] * config.hidden_size / 3)
            own.intermediate_size = width if width % 256 == 0 else width + 256 - width % 256
        whole = LlamaDecoderLayer(own, index)
        if self.attends:
            self.input_layernorm, self.self_attn = whole.input_layernorm, whole.self_attn
        if self.feeds:
            self.post_attention_layernorm, self.mlp = whole.post_attention_layernorm, whole.mlp

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        if self.attends:
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **given)[0]
        if self.feeds:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class DeciLMForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(DeciLMLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


AutoConfig.register("nemotron-nas", DeciLMConfig)
AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM)
