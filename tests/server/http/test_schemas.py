"""What `read` says of a field that is none of the few values it may be."""

from typing import Annotated, Literal

import pytest
from msgspec import Meta

from server.errors import InvalidValue
from server.http.schemas import GenerationFields, Message, read


class Painted(GenerationFields, frozen=True, kw_only=True):
    """Fields that only take some values, at each depth that a path can have."""

    colour: Literal["red", "blue"]
    shade: Literal[1, 2] | None = None
    layers: Annotated[list[Literal["flat", "matt"]], Meta(max_length=4)] | None = None
    messages: list[Message] | None = None


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"colour": "green"}, "colour", "colour must be blue or red, got a string of length 5."),
        ({"colour": "red", "shade": 3}, "shade", "shade must be 1 or 2, got 3."),
        ({"colour": "red", "layers": ["x"]}, "layers[0]", "layers[0] must be flat or matt, got a string of length 1."),
        ({"colour": "red", "layers": ["flat", 5]}, "layers[1]", "layers[1] must be str, got 5."),
        (
            {"colour": "red", "messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role",
            "messages[0].role must be assistant or developer or system or user, got a string of length 4.",
        ),
    ],
)
def test_a_value_that_is_none_of_a_few_is_answered_by_the_few_of_its_own_field(
    given: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(Painted, given)
    assert (caught.value.param, str(caught.value)) == (param, message)


@pytest.mark.parametrize(
    "given", [{"colour": "red", "shade": "\ud800"}, {"colour": "red", "shade": [1, {"a": "\ud800"}]}]
)
def test_a_text_that_no_text_can_be_is_refused_where_none_is_wanted(given: dict[str, object]) -> None:
    with pytest.raises(InvalidValue, match="shade") as caught:
        read(Painted, given)
    assert caught.value.param == "shade"
