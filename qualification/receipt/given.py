"""The texts of an answer that a receipt is part of, held against the receipt's digests."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from qualification.receipt.content import Content, ReceiptAnswer, canonical, digest, digest_of_text
from qualification.receipt.signed import Receipt, ReceiptError


class Compared(Enum):
    """The extent to which an answer was held against its receipt."""

    NOTHING = "nothing"  # the receipt came alone, or in a stream
    TEXTS = "texts"  # all but calls: the answer has no texts of them as the model wrote them
    ALL = "texts and calls"


def check_given(receipt: Receipt) -> Compared:
    """Return what was compared of the answer that the receipt came in. Raises ReceiptError where one is another."""
    answer = receipt.answer
    if answer is None:
        return Compared.NOTHING
    try:
        return _check(receipt.content, answer)
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError):
        raise ReceiptError("the answer around it is malformed: give the receipt alone") from None


def _check(content: Content, answer: Mapping[str, Any]) -> Compared:
    kind = answer.get("object", answer.get("type"))
    by_index = {it.index: it for it in content.answers}
    is_whole = isinstance(answer.get("usage"), Mapping)  # else it is a chunk of a stream, of the same kind
    if kind == "text_completion" and is_whole and len(answer["choices"]) == len(content.answers):
        for choice in answer["choices"]:
            _check_completion(content, by_index[choice["index"]], choice["text"])
        return Compared.ALL
    if kind == "chat.completion":
        for choice in answer["choices"]:
            _check_message(by_index[choice["index"]], choice["message"])
        return Compared.ALL
    if kind == "message":
        return _check_blocks(by_index[0], answer["content"])
    if kind == "response":
        return _check_items(by_index[0], answer["output"])
    return Compared.NOTHING


def _check_completion(content: Content, answer: ReceiptAnswer, text: str) -> None:
    """With `echo` the text begins with its prompt's."""
    prompt = content.prompts[answer.prompt].text_digest
    if digest_of_text(text) != answer.text_digest and prompt is not None:
        text = text[_end_of_prompt(text, prompt) :]
    _check_text(answer, text)


def _end_of_prompt(text: str, prompt_digest: str) -> int:
    """Return how many characters have the prompt's digest; 0 where no beginning of the text has."""
    begun = hashlib.sha256()
    for end, char in enumerate(text, start=1):
        begun.update(char.encode())
        if begun.copy().hexdigest() == prompt_digest:
            return end
    return 0


def _check_message(answer: ReceiptAnswer, message: Mapping[str, Any]) -> None:
    _check_text(answer, message["content"] or "")
    _check_reasoning(answer, message.get("reasoning_content") or "")
    _check_calls(
        answer, [[it["function"]["name"], it["function"]["arguments"]] for it in message.get("tool_calls") or ()]
    )


def _check_blocks(answer: ReceiptAnswer, blocks: Sequence[Mapping[str, Any]]) -> Compared:
    """Anthropic's blocks have the arguments of a call as an object, and thinking may be left out of them."""
    _check_text(answer, "".join(_texts(blocks, "text", "text")))
    thinking = _texts(blocks, "thinking", "thinking")
    if all(thinking):
        _check_reasoning(answer, "".join(thinking))
    has_calls = any(block["type"] == "tool_use" for block in blocks)
    if has_calls != (answer.calls_digest is not None):
        raise _another(answer, "call")
    return Compared.TEXTS if has_calls else Compared.ALL


def _check_items(answer: ReceiptAnswer, items: Sequence[Mapping[str, Any]]) -> Compared:
    """The items of a response: calls of plain functions have the name and the arguments that the model wrote."""

    def parts(kind: str) -> list[Mapping[str, Any]]:
        return [part for item in items if item["type"] == kind for part in item["content"]]

    _check_text(answer, "".join(_texts(parts("message"), "output_text", "text")))
    _check_reasoning(answer, "".join(_texts(parts("reasoning"), "reasoning_text", "text")))
    calls = [item for item in items if item["type"] not in ("message", "reasoning")]
    if all(call["type"] == "function_call" and call.get("namespace") is None for call in calls):
        _check_calls(answer, [[call["name"], call["arguments"]] for call in calls])
        return Compared.ALL
    if answer.calls_digest is None:
        raise _another(answer, "call")
    return Compared.TEXTS


def _check_reasoning(answer: ReceiptAnswer, text: str) -> None:
    if (digest_of_text(text) if text else None) != answer.reasoning_digest:
        raise _another(answer, "reasoning")


def _check_calls(answer: ReceiptAnswer, calls: list[list[str]]) -> None:
    """Hold the names and arguments of all calls, in their order, against the receipt."""
    if (digest(canonical(calls)) if calls else None) != answer.calls_digest:
        raise _another(answer, "call")


def _check_text(answer: ReceiptAnswer, text: str) -> None:
    if digest_of_text(text) != answer.text_digest:
        raise _another(answer, "text")


def _another(answer: ReceiptAnswer, what: str) -> ReceiptError:
    return ReceiptError(f"it is of another {what} than choice {answer.index} of the answer around it has")


def _texts(parts: Iterable[Mapping[str, Any]], kind: str, name: str) -> list[str]:
    """Texts of the parts of a type."""
    return [part[name] for part in parts if part["type"] == kind]
