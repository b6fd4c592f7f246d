"""Phi-3 without LongRoPE: a Llama whose checkpoint holds merged matrices, with a window in the 4k models (2047)."""

from dataclasses import replace

from server.model.config import ModelConfig, RopeKind
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.shared_fields import read_shared
from server.model.families.tensor_views import fused_views
from server.model.families.window_fields import read_uniform_windows


def read_config(fields: Fields) -> ModelConfig:
    config = read_shared(fields, "phi3", norm_eps=1e-5, rope_kinds=(RopeKind.PLAIN,))
    return replace(config, windows=read_uniform_windows(fields, config.num_layers, missing=None))


PHI3 = Family("phi3", ("Phi3ForCausalLM",), read_config, fused_views)
