"""The family that serves a config.json: whether a model is served is decided before its weights are read or fetched."""

from collections.abc import Mapping

from qualification.model.families.family import Family
from qualification.model.families.image_models import image_model_of
from qualification.model.families.registry import family_named, nearest, reason_of, reason_of_class
from qualification.model.fields import ModelConfigError


def served_family(config: Mapping[str, object], source: str) -> Family:
    """Return the family of a parsed config.json; of a model that also sees images, its text part's.

    Raises ModelConfigError for one that the server does not serve, which names the nearest.
    """
    image_model, architectures = image_model_of(config), config.get("architectures")
    known_reason = reason_of(config.get("model_type"))
    if image_model is None and "text_config" in config:
        raise ModelConfigError(
            f"{source}: model_type {config.get('model_type')!r} also sees images, which is not supported"
            f"{known_reason}: serve a checkpoint of text alone, or of a model whose text part is served; "
            f"{nearest(config.get('model_type'), architectures)}"
        )
    model_type = image_model.text_family(config, source) if image_model else config.get("model_type")
    family = family_named(model_type, source, architectures=architectures)
    known = image_model.architectures if image_model else family.architectures
    found = architectures or list(known)
    if not isinstance(found, list) or not any(name in known for name in found):
        supported, reason = ", ".join(known), reason_of_class(found) if isinstance(found, list) else ""
        raise ModelConfigError(f"{source}: architectures {found} are not supported; supported: {supported}{reason}")
    return family
