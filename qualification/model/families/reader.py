"""The architecture of any model whose family is known, whether or not the server serves it."""

from collections.abc import Mapping

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.families.image_models import image_model_of, text_section, with_image_spans
from qualification.model.families.quantization import quantized
from qualification.model.families.quantization_config import CONFIG_KEY, read_quantization
from qualification.model.families.registry import KNOWN, family_named
from qualification.model.fields import Fields, ModelConfigError
from qualification.model.keys import Keys

# What a model that also sees images may say once for all of its parts.
_OF_THE_WHOLE = (
    "dtype", "torch_dtype", "eos_token_id", "max_position_embeddings", "tie_word_embeddings", "vocab_size", CONFIG_KEY,
)  # fmt: skip
_OF_THE_HEAD = "tie_word_embeddings"  # which is outside the text part, and obeys the whole


def read_model(config: Mapping[str, object], source: str = "config.json") -> ModelConfig:
    """Read a parsed config.json; of a model that also sees images, the text part. Raises ModelConfigError."""
    values = text_part(config)
    check_whole(config, source)
    image_model = image_model_of(config)
    name = values.get("model_type") if image_model is None else image_model.text_family(config, source)
    return with_image_spans(read_as(family_named(name, source, KNOWN), values, source), config)


def read_as(family: Family, values: Mapping[str, object], source: str) -> ModelConfig:
    """Read the parsed config.json of a model of a family, its products in the formats that it names.

    Raises ModelConfigError.
    """
    model = family.read(values, source)
    quantization = None if family.has_quantization else Fields(values, source).section(CONFIG_KEY)
    if quantization is None:
        return model
    if family.tensors is None:
        raise ModelConfigError(f"{source}: {CONFIG_KEY} is not supported for {family.model_type}")
    return quantized(model, read_quantization(quantization), family)


def check_whole(config: Mapping[str, object], source: str) -> None:
    """Raise ModelConfigError for a key that is refused in a model that also sees images: in it, or in its text part."""
    image_model = image_model_of(config)
    if image_model is not None:
        image_model.keys.check(config, source)
        text = Fields(config, source).section(image_model.text)
        if text is not None and text.has(CONFIG_KEY) and config.get(CONFIG_KEY) not in (None, text.given(CONFIG_KEY)):
            text.refuse(CONFIG_KEY, f"absent, or as beside {image_model.text}, where it is of all parts")
        Keys(refused=image_model.refused_in_text).check(text_part(config), source)


def unknown_keys(config: Mapping[str, object], family: Family) -> list[str]:
    """Return the keys of a parsed config.json that are not known for its family, hence not read."""
    image_model, text = image_model_of(config), text_section(config)
    if image_model is None:
        return family.keys.unknown(config)
    if text is not None:
        return image_model.keys.unknown(config) + [f"{image_model.text}.{name}" for name in family.keys.unknown(text)]
    return image_model.keys.unknown(family.keys.unknown(config))


def text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields of the text part with those beside it, where a model also sees images."""
    text = text_section(config)
    if text is None:
        return config
    given = {name: value for name, value in text.items() if value is not None or name not in _OF_THE_WHOLE}
    whole = {name: config[name] for name in _OF_THE_WHOLE if name in config}
    image_model = image_model_of(config)
    if image_model is not None and image_model.ties_embeddings is not None:
        given[_OF_THE_HEAD] = image_model.ties_embeddings
    if _OF_THE_HEAD in whole:
        given[_OF_THE_HEAD] = whole[_OF_THE_HEAD]
    return {**whole, **given}
