"""Fields that take a text, token ids, or a list of either."""

from functools import cache
from typing import Annotated, Any

import msgspec
from pydantic import Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from server.errors import InvalidValue
from server.http.common.fields import kind_of_item, one_of
from server.http.common.validation import Text, tag

MAX_PROMPTS = 64  # also of answers: prompts times n
MAX_INPUTS = 2048  # texts to embed, OpenAI's limit


def _ids(value: Any, validate: Any) -> list[int]:
    try:
        ids: list[int] = validate(value)
    except ValidationError:
        raise PydanticCustomError("token_ids", "a list of token ids") from None
    return ids


def _kind_of_list(value: Any) -> str | None:
    if not isinstance(value, list):
        return "=text" if isinstance(value, str) else None
    if not value:
        return None
    return "=ids" if isinstance(value[0], int) else "=list"


# The bounds of an id depend on the model: see `checked_ids`. Here they would take three times as long.
TokenId = Annotated[
    int,
    WithJsonSchema(
        {"type": "integer", "minimum": 0, "description": "Below the size of the model's vocabulary."}, mode="validation"
    ),
]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_ids)]
_PROMPT = "a string, token ids or a list of either"
_OnePrompt = Annotated[Annotated[Text, tag("text")] | Annotated[TokenIds, tag("list")], one_of(kind_of_item, _PROMPT)]
_Prompts = Annotated[list[_OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Prompts, tag("list")],
    one_of(_kind_of_list, _PROMPT),
]
_InputText = Annotated[Text, Field(min_length=1)]  # the embedding of nothing is one of the end token
_OneInput = Annotated[
    Annotated[_InputText, tag("text")] | Annotated[TokenIds, tag("list")], one_of(kind_of_item, _PROMPT)
]
_Inputs = Annotated[list[_OneInput], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Inputs = Annotated[
    Annotated[_InputText, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Inputs, tag("list")],
    one_of(_kind_of_list, _PROMPT),
]


def listed(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """Each text, or token ids, of a field's value."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return given


def checked_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Token ids of a valid request, within the vocabulary: 8 ns each. Raises InvalidValue."""
    try:
        msgspec.convert(ids, _ids_below(vocab_size))
    except msgspec.ValidationError:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidValue(
            f"{param}: token ids are 0 to {vocab_size - 1}, got {str(wrong)[:24]}.", param=param
        ) from None
    return ids


@cache
def _ids_below(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
