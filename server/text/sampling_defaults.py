"""Sampling that the model's authors recommend in generation_config.json, for requests that do not say otherwise."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from server.errors import ModelError

FILE = "generation_config.json"
# Of requests too. A penalty near 0 turns any logit into an infinity; a penalty below this has no use.
LEAST_REPETITION_PENALTY = 0.01


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults of optional fields; OpenAI's own where the file says nothing. Other keys of the file are not read.

    `do_sample` is among those, as in vLLM: it is the caller's, who asks for greedy answers by temperature 0.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10)] | None = None


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read the defaults; all are None where the model has no such file. Raises ModelError with file and value."""
    path = folder / FILE
    if not path.is_file():
        return SamplingDefaults()
    try:
        return msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error
