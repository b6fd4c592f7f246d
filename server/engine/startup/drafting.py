"""The settings of drafted tokens: a number of them, or more in the format of vLLM's flag."""

from enum import Enum
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import first_path
from kernels.linear.shape import FP8_ROWS, LinearShape
from kernels.vocabulary.path import Tier
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.model.config import ModelConfig
from qualification.model.draft_head import may_round_logits
from server.engine.scheduling.drafter import Drafter
from server.engine.scheduling.ngram_drafter import NgramDrafter
from server.errors import SettingsError
from server.protocol.messages import DraftsPlan
from server.settings import Settings

MOST_DRAFTED = 4  # tokens of a sequence and step
_MOST_BY_HEAD = 3
_MOST_COMPARED = 64
_FLAG, _NUMBER = "--speculative-config", "--speculative-tokens"
# Decoding sequences with more of which a head drafts nothing: a step of a few rows waits for the weights, which drafted
# tokens read with the others; of a mixture's experts more rows read more, and above some tens of rows the GPU computes.
# Measured up to 32: 2 drafts take 3.93 ms a token for 4.11 there (H200, 8 of 40 layers of Qwen3.5-35B-A3B's sizes).
_MOST_SEQS = 32


class Method(Enum):
    """Source of drafts: tokens that were there before, or the model's own head, by three names of vLLM's."""

    NGRAM = "ngram"
    MTP = "mtp"
    QWEN3_NEXT_MTP = "qwen3_next_mtp"
    QWEN3_5_MTP = "qwen3_5_mtp"


class Drafting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that are drafted for each sequence and step.

    disable_by_batch_size  decoding sequences from which on none are; None: the method's own
    prompt_lookup_min, prompt_lookup_max  the least and most tokens before them that are alike
    """

    method: Method
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTED)]
    disable_by_batch_size: Annotated[int, Meta(ge=2)] | None = None
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=_MOST_COMPARED)] | None = None
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=_MOST_COMPARED)] | None = None

    @property
    def lookup(self) -> tuple[int, int]:
        """Return the least and the most tokens that must be alike; one alone stands for both, and none for 5."""
        least = self.prompt_lookup_min or self.prompt_lookup_max or 5
        return least, self.prompt_lookup_max or least

    @property
    def uses_head(self) -> bool:
        """Return whether the model's own head drafts."""
        return self.method is not Method.NGRAM

    @property
    def max_seqs(self) -> int | None:
        """Return with how many decoding sequences tokens are drafted at most; None: with any number."""
        if self.disable_by_batch_size is not None:
            return self.disable_by_batch_size - 1
        return _MOST_SEQS if self.uses_head else None

    @property
    def plan(self) -> DraftsPlan:
        """Return what `/plan` says of it."""
        return DraftsPlan(self.method.value, self.num_speculative_tokens, self.max_seqs)

    def lookup_drafter(self, num_seqs: int) -> Drafter:
        """Return what drafts by look-up, for as many sequences at once."""
        least, longest = self.lookup
        return NgramDrafter(least=least, longest=longest, most_sequences=num_seqs)


def drafting_of(settings: Settings) -> Drafting | None:
    """Return how tokens are drafted; None where the settings ask for none.

    Raises SettingsError for what cannot be read, and for settings that contradict each other.
    """
    text, number = settings.speculative_config, settings.speculative_tokens
    if text is None:
        return None if number is None else Drafting(Method.MTP, number)
    if number is not None:
        raise SettingsError(f"{_NUMBER} and {_FLAG} both say what is drafted: leave one of them out")
    try:
        found = msgspec.json.decode(text, type=Drafting)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{_FLAG} cannot be read: {error}") from error
    least, longest = found.lookup
    if least > longest:
        raise SettingsError(f"{_FLAG}: prompt_lookup_min is {least}, it must be at most prompt_lookup_max, {longest}")
    if not found.uses_head:
        return found
    if found.num_speculative_tokens > _MOST_BY_HEAD:
        raise SettingsError(
            f"{_FLAG}: num_speculative_tokens is {found.num_speculative_tokens}, a model's own head drafts at most "
            f"{_MOST_BY_HEAD}"
        )
    if found.prompt_lookup_min or found.prompt_lookup_max:
        raise SettingsError(f"{_FLAG}: prompt_lookup_min and prompt_lookup_max are of ngram: leave them out")
    return found


def rounds_draft_logits(settings: Settings, model: ModelConfig, dtype: Dtype, device: torch.device) -> bool:
    """Return whether a draft head chooses by a copy of the model's head in 8 bits, a scale a row.

    Each pass reads the head whole: of 248,320 tokens and 2,048 numbers each 1.0 GB in 16 bits, 0.25 ms of a pass's 0.4
    (H200, Qwen3.5-35B-A3B's sizes). No answer changes by it, since the model verifies what is drafted. Under
    --reproducible each product of the plan has an order of sums, which heads of 8 bits do not have on every machine.
    """
    if settings.reproducible or device.type != "cuda" or not may_round_logits(model, dtype):
        return False
    sizes = model.hidden_size, model.vocab_size
    shape = LinearShape(dtype, *sizes, LinearRows.LE_1, has_bias=False, epilogue=Epilogue.FP32, weight_format=FP8_ROWS)
    return first_path(shape, device).tier is Tier.FIRST
