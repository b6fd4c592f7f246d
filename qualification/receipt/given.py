"""The texts of an answer that a receipt is part of, held against the receipt's digests."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from qualification.receipt.content import Content, ReceiptAnswer, canonical, digest, digest_of_text
from qualification.receipt.signed import Receipt, ReceiptError


def check_given(receipt: Receipt) -> bool:
    """Return whether the receipt came within an answer with texts. Raises ReceiptError where one is another text."""
    answer = receipt.answer
    if answer is None:
        return False
    try:
        return _check(receipt.content, answer)
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError):
        raise ReceiptError("the answer around it is malformed: give the receipt alone") from None


def _check(content: Content, answer: Mapping[str, Any]) -> bool:
    kind = answer.get("object", answer.get("type"))
    by_index = {it.index: it for it in content.answers}
    is_whole = isinstance(answer.get("usage"), Mapping)  # else it is a chunk of a stream, of the same kind
    if kind == "text_completion" and is_whole and len(answer["choices"]) == len(content.answers):
        for choice in answer["choices"]:
            _check_completion(content, by_index[choice["index"]], choice["text"])
        return True
    if kind == "chat.completion":
        for choice in answer["choices"]:
            _check_message(by_index[choice["index"]], choice["message"])
        return True
    if kind in ("message", "response"):
        texts = _blocks(answer["content"]) if kind == "message" else _items(answer["output"])
        _check_text(by_index[0], "".join(texts))
        return True
    return False


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
    reasoning = message.get("reasoning_content")
    if (digest_of_text(reasoning) if reasoning else None) != answer.reasoning_digest:
        raise _another(answer, "reasoning")
    calls = [[it["function"]["name"], it["function"]["arguments"]] for it in message.get("tool_calls") or ()]
    if (digest(canonical(calls)) if calls else None) != answer.calls_digest:
        raise _another(answer, "call")


def _check_text(answer: ReceiptAnswer, text: str) -> None:
    if digest_of_text(text) != answer.text_digest:
        raise _another(answer, "text")


def _another(answer: ReceiptAnswer, what: str) -> ReceiptError:
    return ReceiptError(f"it is of another {what} than choice {answer.index} of the answer around it has")


def _blocks(blocks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Texts of Anthropic's blocks."""
    return [block["text"] for block in blocks if block["type"] == "text"]


def _items(items: Iterable[Mapping[str, Any]]) -> list[str]:
    """Texts of the items of a response."""
    return [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
