"""The shadow check of an engine that is about to be ready."""

from random import Random

from kernels.device import torch_dtype
from qualification.decision.decision import Policy
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.proof.shadow_sample import blank_sample, judge_sample
from server.engine.startup.kv_sizing import Parts
from server.settings import Settings


def shadow_check(settings: Settings, parts: Parts) -> ShadowCheck:
    """By the settings. One blank sample is judged here: a GPU loads its libraries now, and not between two steps."""
    attention, limits = parts.config.layers[0].attention, parts.limits
    blank = blank_sample(
        group=attention.num_heads // attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=torch_dtype(limits.dtype),
        kv_dtype=torch_dtype(limits.kv_dtype),
        device=parts.device,
    )
    judge_sample(blank, Random(0))
    return ShadowCheck(
        parts.dispatcher,
        budget=settings.shadow_budget,
        interval_s=settings.shadow_interval_s,
        is_quarantining=settings.on_unproven is not Policy.DEGRADE,
    )
