"""Validation of a parsed JSON object: a pydantic model, or an error that names the field.

pydantic alone would not do for bodies from strangers: its errors hold the input, which may be a prompt; a union of
types collects the errors of all of them (4.8 million, 2 GiB and 22 s for a body of 9 MiB); and an object collects an
error for each unknown name. So unions choose their type by a discriminator, lists stop at their first error, names are
looked at before the model is, and of pydantic's error only its place and its limit are used.
"""

import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Tag, ValidationError
from pydantic_core import PydanticCustomError

from server.edge.redact import plain_name, redacted
from server.errors import HallmarkError, InvalidValue, UnknownField, UnsupportedField
from server.http.common.peer_fields import advice

NO_EFFECT = "Taken, and changes nothing"  # begins the description of such a field
_LONGEST_NAME = 64  # that is looked for among the known ones
_TAG = "="  # begins each tag of a union: pydantic puts it in the place of an error, and no field begins so


def _document(schema: dict[str, Any], model: type["RequestModel"]) -> None:
    """Write into a JSON schema what `read` takes beside the model's own fields: nulls, and fields without effect."""
    properties: dict[str, Any] = schema.setdefault("properties", {})
    required = schema.get("required", ())
    for name, field in properties.items():
        field.pop("title", None)
        if name not in required and {"type": "null"} not in field.get("anyOf", ()):
            outside = {key: field.pop(key) for key in ("description", "default") if key in field}
            properties[name] = outside | {"anyOf": [field, {"type": "null"}]}
    for name, neutral in model.unsupported.items():
        if name not in properties:
            values = [value for i, value in enumerate(neutral) if value not in neutral[:i]]  # 1.0 and 1 are one in JSON
            properties[name] = {
                "enum": [*values, None],
                "description": "Not implemented: any other value is refused with `unsupported_field`.",
            }
    schema["additionalProperties"] = model.is_open or {"type": "null"}


class RequestModel(BaseModel):
    """An object in a request: no value is converted, no unknown name is taken, and a null counts as absent.

    Lists and objects get their defaults by `default_factory`: pydantic would deepcopy a default, 1 us each.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, json_schema_extra=_document
    )

    # Fields that are known and not implemented, each with the values that ask for nothing: those are taken and dropped.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Whether other fields than the model's are taken, and not looked at.
    is_open: ClassVar[bool] = False
    # Fields that hold an object, or a list with objects in it.
    nested: ClassVar[Mapping[str, "type[RequestModel] | Variants"]] = {}
    unknown_field_message: ClassVar[str] = "The field {field!r} is unknown."
    missing_field_message: ClassVar[str] = "The field {field!r} is missing."

    @classmethod
    def has_effect(cls, name: str) -> bool:
        """Return whether a field changes anything, by its description."""
        return not (cls.model_fields[name].description or "").startswith(NO_EFFECT)


def field_names(model: type[RequestModel] = RequestModel) -> frozenset[str]:
    """Return the names of all fields of a model and of those made of it, implemented or not."""
    own = _names_of(model) | model.unsupported.keys()
    return own.union(*[field_names(it) for it in model.__subclasses__()])


class Variants:
    """Objects of several kinds, named by their `type`."""

    def __init__(
        self, models: Mapping[str, type[RequestModel]], *, default: str | None = None, refused: Sequence[str] = ()
    ) -> None:
        """default  the type of an object without one
        refused  types that are known and not implemented"""
        self._models = models
        self._default = default
        self._refused = frozenset(refused)

    def model_of(self, value: Mapping[str, Any], place: str) -> type[RequestModel]:
        """The model of an object at `place`. Raises UnsupportedField and InvalidValue, naming its type."""
        kind = self._kind(value)
        if isinstance(kind, str) and kind in self._models:
            return self._models[kind]
        if kind is None:
            raise InvalidValue(f"The field '{place}.type' is missing.", param=f"{place}.type")
        if isinstance(kind, str) and kind in self._refused:
            raise UnsupportedField(f"{place}: the type {kind!r} is not implemented.", param=f"{place}.type")
        wanted = " or ".join(self._models)
        raise InvalidValue(f"{place}.type must be {wanted}, got {redacted(kind)}.", param=f"{place}.type")

    def tag_of(self, value: Any) -> str | None:
        """The tag of an object's model in a union, for pydantic; `model_of` has seen each object before."""
        return _TAG + self._kind(value) if isinstance(value, dict) else None

    def _kind(self, value: Mapping[str, Any]) -> Any:
        kind = value.get("type")
        return self._default if kind is None else kind


ModelT = TypeVar("ModelT", bound=RequestModel)


def read(model: type[ModelT], body: Mapping[str, Any]) -> ModelT:
    """`body` as a valid `model`. Raises UnsupportedField, UnknownField or InvalidValue, each naming the field."""
    given = _known_fields(body, model, "")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "missing":
            field = _path(_steps(first["loc"]))
            raise InvalidValue(model.missing_field_message.format(field=field), param=field) from None
        raise _refusal(first["type"], first["msg"], first.get("ctx", {}), first["loc"], given) from None


def refusal_of(model: type[RequestModel], name: str, prefix: str = "") -> str:
    """The message that refuses a field of `unsupported`. `prefix`: where its object is."""
    neutral = " or ".join(map(json.dumps, model.unsupported[name]))
    but = f"; all it may be is {neutral}" if neutral else ""
    return f"The field {prefix + name!r} is not implemented{but}."


def tag(name: str) -> Tag:
    """The tag of one type in a union."""
    return Tag(_TAG + name)


def _checked_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("string_unicode", "UTF-8 text") from None
    return text


# JSON can hold half a surrogate pair, which no text in UTF-8 has.
Text = Annotated[str, AfterValidator(_checked_text)]


def _checked_tree(value: Any) -> Any:
    """Raises for a text within that UTF-8 does not have. The body's depth is limited already."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("not_utf8", "without lone surrogates") from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _checked_tree(key)
            _checked_tree(inner)
    elif isinstance(value, list):
        for inner in value:
            _checked_tree(inner)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_checked_tree)]


@contextlib.contextmanager
def translated(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of a request that was made of a client's: they name the client's own field.

    names  by the field of the request that was made, where they differ
    """
    try:
        yield
    except HallmarkError as error:
        if error.param is not None:
            own = translated_name(error.param, names)
            error.message = re.sub(rf"(?<!\w){re.escape(error.param)}(?!\w)", own, error.message, count=1)
            error.param = own
        raise


def translated_name(param: str, names: Mapping[str, str]) -> str:
    """The client's field that a field of the request that was made stands for, as `translated` has it."""
    name = re.split(r"\W", param, maxsplit=1)[0]
    return names.get(name, name)


@cache
def _names_of(model: type[RequestModel]) -> frozenset[str]:
    """The names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _known_fields(body: Mapping[str, Any], model: type[RequestModel], prefix: str) -> dict[str, Any]:
    """`body` without nulls and without unimplemented fields that ask for nothing."""
    given: dict[str, Any] = {}
    names = _names_of(model)
    for name, value in body.items():
        if value is None:
            continue
        if name in names:
            given[name] = value
        elif model.is_open:
            continue
        elif name not in model.unsupported:
            field = prefix + plain_name(name)
            message = model.unknown_field_message.format(field=field)
            meant = advice(name, names) if not prefix and len(name) <= _LONGEST_NAME else ""
            raise UnknownField(f"{message.removesuffix('.')}{meant}{'' if meant.endswith('?') else '.'}", param=field)
        elif not any(type(value) is type(neutral) and value == neutral for neutral in model.unsupported[name]):
            raise UnsupportedField(refusal_of(model, name, prefix), param=prefix + name)
    for name, inner in model.nested.items():
        value = given.get(name)
        if isinstance(value, dict):
            given[name] = _known_object(value, inner, prefix + name)
        elif isinstance(value, list):
            given[name] = [
                _known_object(item, inner, f"{prefix}{name}[{i}]") if isinstance(item, dict) else item
                for i, item in enumerate(value)
            ]
    return given


def _known_object(value: Mapping[str, Any], model: type[RequestModel] | Variants, place: str) -> dict[str, Any]:
    found = model.model_of(value, place) if isinstance(model, Variants) else model
    return _known_fields(value, found, place + ".")


# What a value must be, by the type of pydantic's error.
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
    "greater_than": "{number} greater than {gt}",
    "greater_than_equal": "{number} of at least {ge}",
    "less_than_equal": "{number} of at most {le}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_too_short": "a string of at least {min_length} characters",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "too_long": "an array of at most {max_length} items",
    "too_short": "an array of at least {min_length} items",
}


def _refusal(
    kind: str, message: str, context: Mapping[str, Any], place: Sequence[str | int], given: Mapping[str, Any]
) -> HallmarkError:
    """An error of pydantic as one of ours, with the value's kind in place of the value."""
    steps = _steps(place)
    field = _path(steps)
    value: Any = given
    for step in steps:
        value = value[step]
    if kind == "unsupported":
        return UnsupportedField(f"{field} {message}.", param=field)
    if kind == "string_unicode":
        return InvalidValue(f"{field} has a lone surrogate at character {_first_surrogate(value)}.", param=field)
    if kind == "wrong_type" and steps and isinstance(steps[-1], int):
        return InvalidValue(f"{_path(steps[:-1])} must be {message}, got {redacted(value)} at {field}.", param=field)
    if kind in ("too_long", "too_short") and isinstance(value, str):  # pydantic's, where a validator comes before
        kind = f"string_{kind}"
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        wanted = context["expected"].replace("'", "").replace(", ", " or ")
        close = difflib.get_close_matches(value[:_LONGEST_NAME].lower(), names, n=1) if isinstance(value, str) else []
        if close:  # the value itself may be a secret
            return InvalidValue(
                f"{field} must be {wanted}, got {redacted(value)}; did you mean {close[0]}?", param=field
            )
    elif kind in _WANTED:
        limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        is_integer = any(isinstance(context.get(name), int) for name in ("gt", "ge", "le"))
        wanted = _WANTED[kind].format(number="an integer" if is_integer else "a number", **limits)
    else:
        wanted = message
    return InvalidValue(f"{field} must be {wanted}, got {redacted(value)}.", param=field)


def _steps(place: Sequence[str | int]) -> list[str | int]:
    """The names and indices that lead to a value, without the tags of unions."""
    return [step for step in place if not (isinstance(step, str) and step.startswith(_TAG))]


def _path(steps: Sequence[str | int]) -> str:
    """Write a field's place, for example messages[0].role."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _first_surrogate(text: str) -> int:
    return next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
