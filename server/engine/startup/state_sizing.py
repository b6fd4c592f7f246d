"""Slots of recurrent states: one for each sequence that runs, and some for snapshots, as the memory takes them."""

import logging
from dataclasses import dataclass, replace

import torch

from kernels.vocabulary.shape import Dtype
from qualification.model.config import ModelConfig, state_bytes, weight_bytes
from qualification.model.gated_delta import GatedDeltaConfig, with_state_dtype
from server.engine.startup.kv_sizing import device_bytes
from server.engine.startup.limits import EngineLimits
from server.errors import SettingsError
from server.protocol.messages import StateSlots
from server.settings import DtypeChoice, Settings

logger = logging.getLogger(__name__)

# Of the memory beside the weights, as long as no setting asks for more: the rest is for pages and steps. A state of
# Qwen3.5-35B-A3B's sizes takes as much as 4,300 tokens of its pages.
_SHARE_OF_STATES = 0.5


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a slot, and of what is left for slots and pages beside the weights."""

    slot_bytes: int
    left_bytes: int

    def __str__(self) -> str:
        return f"states of {self.slot_bytes / 2**20:.1f} MiB, {self.left_bytes / 2**30:.1f} GiB are left by the weights"


def with_states_of(settings: Settings, model: ModelConfig) -> ModelConfig:
    """Return the model with states as the settings ask for. Raises SettingsError for a dtype that they cannot have."""
    choice = settings.mamba_ssm_cache_dtype
    if choice is DtypeChoice.AUTO:
        return model
    flag = f"--mamba-ssm-cache-dtype is {choice.value}"
    if choice is DtypeChoice.FP16:
        raise SettingsError(f"{flag}: states are kept in fp32 or bf16, whose range is that of fp32")
    if not any(isinstance(it, GatedDeltaConfig) for it in model.recurrences):
        raise SettingsError(f"{flag}: no layer of the model keeps such states, leave it out")
    return with_state_dtype(model, Dtype(choice.value))


def with_state_slots(
    settings: Settings, config: ModelConfig, limits: EngineLimits, device: torch.device
) -> EngineLimits:
    """Return the limits with a number of snapshots, and where the states need it with fewer sequences that run at once.

    config  of this rank's part of the model
    Limits of a model without recurrent layers stay as they are. What a setting asks for is not reduced: raises
    SettingsError where the memory cannot take it, or no layer keeps states.
    """
    if not config.recurrences:
        if settings.state_snapshots is not None:
            raise SettingsError(
                f"--state-snapshots is {settings.state_snapshots}: no layer of the model keeps states, leave it out"
            )
        return limits
    share = settings.gpu_memory_utilization if device.type == "cuda" else 1.0
    left = int(device_bytes(device) * share) - weight_bytes(config, limits.dtype)
    room = _Room(state_bytes(config, limits.dtype), max(0, left))
    num_fitting = int(room.left_bytes * _SHARE_OF_STATES) // room.slot_bytes
    asked, num_seqs = settings.state_snapshots, limits.max_num_seqs
    if settings.max_num_seqs is None:
        num_seqs = max(1, min(num_seqs, num_fitting - (asked or 0)))
    if num_seqs < limits.max_num_seqs:
        logger.warning("%d sequences run at once, and not %d: %s", num_seqs, limits.max_num_seqs, room)
    snapshots = min(num_seqs, max(0, num_fitting - num_seqs)) if asked is None else asked
    if (num_seqs + snapshots) * room.slot_bytes > room.left_bytes:
        wanted = f"{num_seqs} sequences that run at once and {snapshots} snapshots need {num_seqs + snapshots}"
        raise SettingsError(f"{wanted} {room}: lower --max-num-seqs or --state-snapshots")
    return replace(limits, max_num_seqs=num_seqs, state_snapshots=snapshots)


def state_slots(config: ModelConfig, limits: EngineLimits) -> StateSlots | None:
    """Return the slots of states; None for a model without recurrent layers.

    They are allocated before the room for pages is measured.
    """
    if not config.recurrences:
        return None
    snapshots = limits.max_num_seqs if limits.state_snapshots is None else limits.state_snapshots
    return StateSlots(limits.max_num_seqs + snapshots, snapshots, state_bytes(config, limits.dtype))
