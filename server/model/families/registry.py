"""Every model family there is. A new one is a file beside this one and a line here."""

from server.errors import ModelError
from server.model.families.family import Family
from server.model.families.llama import LLAMA
from server.model.families.mistral import MISTRAL
from server.model.families.phi3 import PHI3
from server.model.families.qwen2 import QWEN2
from server.model.families.qwen3 import QWEN3

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    PHI3,
    QWEN2,
    QWEN3,
)


def family_named(model_type: object, source: str) -> Family:
    """The family of config.json's model_type. Raises ModelError that names the supported ones."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    supported = ", ".join(family.model_type for family in FAMILIES)
    raise ModelError(f"{source}: model_type {model_type!r} is not supported; supported: {supported}")
