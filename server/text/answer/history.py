"""Calls of a conversation as a model has written them, for a chat template that has no place for them."""

from collections.abc import Callable, Sequence
from typing import Any

from server.text.answer.formats import Shape
from server.text.answer.forms.call_array import ArrayMarks
from server.text.answer.forms.hermes import Hermes
from server.text.answer.forms.marked import Marks
from server.text.answer.forms.pythonic import PythonMarks
from server.text.request_text import joined
from server.text.tools import hermes_call, request_json

Function = dict[str, Any]  # a call's name and arguments, these an object or a text that is no JSON


def writer_of(shape: Shape, source: str) -> Callable[[Sequence[Function]], str] | None:
    """Return what writes the calls of a message in a form; None for a form whose templates all have calls.

    source  the chat template, which says which of several marks its model knows
    """
    match shape:
        case ArrayMarks(pairs) as array:
            opening, closing = next((pair for pair in pairs if pair[0] in source), pairs[-1])
            return lambda calls: joined((opening, request_json([_object(array, it) for it in calls]), closing))
        case PythonMarks(marks=(opening, closing), has_brackets=True):
            return lambda calls: joined((opening, "[", joined(map(_python, calls), ", "), "]", closing))
        case Marks() as form:
            return lambda calls: _marked(form, calls)
        case type() if shape is Hermes:
            return lambda calls: joined(map(hermes_call, calls), "\n")
        case _:
            return None


def _object(form: ArrayMarks, function: Function) -> Function:
    return {form.name: function["name"], form.arguments: function["arguments"]}


def _python(function: Function) -> str:
    given = function["arguments"]
    fields = given.items() if isinstance(given, dict) else ()
    return joined((function["name"], "(", joined((joined((key, "=", _literal(it))) for key, it in fields), ", "), ")"))


def _literal(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else request_json(value)


def _marked(form: Marks, calls: Sequence[Function]) -> str:
    texts = []
    for number, function in enumerate(calls):
        before, behind = form.written.replace("{number}", str(number)).split("{name}")
        arguments = request_json(function["arguments"])
        texts.append(joined((form.call[0], before, function["name"], behind, arguments, form.tail, form.call[1])))
    return joined((form.section[0], joined(texts, form.between), form.section[1]))
