"""Step 3.5 of text alone: transformers has its layers as a part of Step 3.7, and no class with a head of its own.

Saved, its tensors have the names and layout of the published files.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

Step3p5Config = Step3p7TextConfig  # whose model_type is step3p5
_RENAMED = {
    ".mlp.gate.weight": ".moe.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
    ".mlp.shared_experts.": ".share_expert.",
}
_GATE_UP = ".mlp.experts.gate_up_proj"


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    config_class = Step3p5Config
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 -- transformers' own form

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **given: Any) -> MoeCausalLMOutputWithPast:
        given.pop("logits_to_keep", None)
        out = self.model(input_ids=input_ids, **given)
        return MoeCausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), cache=out.cache)

    def save_pretrained(self, save_directory: str | Path, **given: Any) -> None:
        super().save_pretrained(save_directory, **given)
        file = Path(save_directory) / "model.safetensors"
        save_file(dict(_published(load_file(file))), file)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, config: Step3p7TextConfig | None = None, **given: Any) -> Any:
        """Load tensors of the published names."""
        tensors = _of_class(load_file(Path(folder) / "model.safetensors"))
        config = config or Step3p5Config.from_pretrained(folder)
        return super().from_pretrained(None, config=config, state_dict=tensors, **given)


def _published(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    found = []
    for name, tensor in tensors.items():
        if name.endswith(_GATE_UP):
            halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            layer = name.removesuffix(_GATE_UP)
            found += [(f"{layer}.moe.{part}_proj.weight", half.contiguous()) for part, half in halves]
            continue
        old = next((it for it in _RENAMED if it in name), "")
        found.append((name.replace(old, _RENAMED[old]) if old else name, tensor))
    return found


def _of_class(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_gate, _ = name.partition(".moe.gate_proj.weight")
        if is_gate:
            found[f"{layer}{_GATE_UP}"] = torch.cat((tensor, tensors[f"{layer}.moe.up_proj.weight"]), dim=1)
        elif ".moe.up_proj." not in name:
            new = next((it for it, old in _RENAMED.items() if old in name), "")
            found[name.replace(_RENAMED[new], new) if new else name] = tensor
    return found


AutoModelForCausalLM.register(Step3p5Config, Step3p5ForCausalLM, exist_ok=True)
