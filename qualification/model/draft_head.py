"""The draft head of Qwen 3 Next and Qwen 3.5 (MTP): a layer that attends, behind the model, and predicts a token more.

Of position p it reads the embedding of token p + 1 and the model's normed output of token p, each normed, through one
product; the token behind p + 1 is chosen by its own last norm and the model's head. Files name its tensors `mtp.`.

Source: Gloeckle et al. 2024 (multi-token prediction), DeepSeek-V3 (2024), section 2.2: here with one layer.
"""

from dataclasses import replace

from kernels.linear.shape import FP8_ROWS, PLAIN
from kernels.vocabulary.shape import Dtype
from qualification.model.config import LayerConfig, ModelConfig
from qualification.model.fields import ModelConfigError

DRAFT_HEAD = "draft_head"  # phase, in reports, of an attested pass of a draft head, whose shapes are the model's
PREFIX = "mtp."
PRODUCT = f"{PREFIX}fc.weight"
LAYER = f"{PREFIX}layers.0"
_OF_LAYER = f"{LAYER}."


def with_draft_head(model: ModelConfig) -> ModelConfig:
    """Return the model with its draft head's layer behind all others. Raises ModelConfigError where it has no such."""
    layer = model.draft_layer or last_attending(model)
    if layer is None or not model.recurrences:
        raise ModelConfigError(f"models of {model.family} have no draft head that is read")
    return replace(model, layers=(*model.layers, layer), num_draft_layers=1)


def last_attending(model: ModelConfig) -> LayerConfig | None:
    """Return the last layer that attends, which a draft head's is like; None without one."""
    return next((it for it in reversed(model.layers) if it.attends), None)


def without_draft_head(model: ModelConfig) -> ModelConfig:
    """Return the model alone, which computes its answers."""
    if not model.num_draft_layers:
        return model
    return replace(model, layers=main_layers(model), num_draft_layers=0, rounds_draft_logits=False)


def may_round_logits(model: ModelConfig, dtype: Dtype) -> bool:
    """Return whether a copy of the model's head in 8 bits is less to read: of weights of 16 bits as they are."""
    return model.head_format == PLAIN and dtype is not Dtype.FP32


def draft_head_of(model: ModelConfig) -> ModelConfig:
    """Return the draft head as a model of its layer alone."""
    assert model.num_draft_layers, "the model has a draft head"
    head_format = FP8_ROWS if model.rounds_draft_logits else model.head_format
    layers = model.layers[-model.num_draft_layers :]
    return replace(model, layers=layers, num_draft_layers=0, head_format=head_format)


def main_layers(model: ModelConfig) -> tuple[LayerConfig, ...]:
    """Return the layers that compute answers."""
    return model.layers[: model.num_layers - model.num_draft_layers]


def name_in_model(name: str, model: ModelConfig) -> str:
    """Return a checkpoint's name of a tensor as if the draft head's layer were the model's last one."""
    if not model.num_draft_layers or not name.startswith(_OF_LAYER):
        return name
    return f"model.layers.{model.num_layers - 1}.{name.removeprefix(_OF_LAYER)}"
