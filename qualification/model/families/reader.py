"""The architecture of any model whose family is known, whether or not the server serves it."""

from collections.abc import Mapping
from dataclasses import replace

from qualification.model.config import ModelConfig
from qualification.model.families.registry import KNOWN, family_named
from qualification.model.fields import Fields

# What a model that also sees images may say once for all of its parts.
_OF_THE_WHOLE = (
    "dtype", "torch_dtype", "eos_token_id", "max_position_embeddings", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
_OF_THE_HEAD = ("tie_word_embeddings",)  # which is outside the text part, and obeys the whole


def read_model(config: Mapping[str, object], source: str = "config.json") -> ModelConfig:
    """Read a parsed config.json; of a model that also sees images, the text part. Raises ModelConfigError."""
    values = text_part(config)
    model = family_named(values.get("model_type"), source, KNOWN).read_config(Fields(values, source))
    # The tokens of Gemma 3's images see each other both ways; those of Qwen's do not.
    return replace(model, has_image_spans=config.get("model_type") == "gemma3" and "vision_config" in config)


def text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of the text part: `text_config` with the fields beside it, where a model also sees images."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    given = {name: value for name, value in text.items() if value is not None or name not in _OF_THE_WHOLE}
    whole = {name: config[name] for name in _OF_THE_WHOLE if name in config}
    given.update({name: whole[name] for name in _OF_THE_HEAD if name in whole})
    return {**whole, **given}
