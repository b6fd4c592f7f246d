"""Messages of `read` on a field that is none of the few values it may be."""

from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from server.errors import InvalidValue
from server.http.common.validation import RequestModel, read
from server.http.openai.requests import GenerationRequest, Message


class Painted(GenerationRequest):
    """Fields that only take some values, at each depth that a path can have."""

    nested: ClassVar[dict[str, type[RequestModel]]] = {"messages": Message}

    colour: Literal["blue", "red"]
    shade: Literal[1, 2] | None = None
    layers: Annotated[list[Literal["flat", "matt"]], Field(max_length=4)] | None = None
    messages: list[Message] | None = None


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"colour": "green"}, "colour", "colour must be blue or red, got a string of length 5."),
        ({"colour": "red", "shade": 3}, "shade", "shade must be 1 or 2, got 3."),
        ({"colour": "red", "layers": ["x"]}, "layers[0]", "layers[0] must be flat or matt, got a string of length 1."),
        ({"colour": "red", "layers": ["flat", 5]}, "layers[1]", "layers[1] must be flat or matt, got 5."),
        (
            {"colour": "red", "messages": [{"role": "critic", "content": "a"}]},
            "messages[0].role",
            "messages[0].role must be assistant or developer or system or tool or user, got a string of length 6.",
        ),
    ],
)
def test_a_wrong_choice_is_answered_by_the_few(given: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(Painted, given)
    assert (caught.value.param, str(caught.value)) == (param, message)


@pytest.mark.parametrize(
    "given", [{"colour": "red", "shade": "\ud800"}, {"colour": "red", "shade": [1, {"a": "\ud800"}]}]
)
def test_a_text_that_no_text_can_be_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(InvalidValue, match="shade") as caught:
        read(Painted, given)
    assert caught.value.param == "shade"
