"""Reasoning before a bound answer: the model thinks as it likes, and the grammar begins where it has ended."""

import msgspec

from server.grammar.rules import Rules
from server.protocol.messages import Grammar
from server.text.answer.syntax import Reasoning

_BREAKS = r"/\n{1,2}/"  # between the end of reasoning and the answer, as models write them; no part of the answer


def behind_reasoning(
    grammar: Grammar, reasoning: Reasoning, added_ids: dict[str, int], *, has_head: bool = True
) -> Grammar:
    """Return the grammar of an answer that may have reasoning before it.

    added_ids  ids of the tokenizer's added tokens by their text
    has_head   whether the mark that opens an answer stands before it; else the grammar has it, as those of calls do
    """
    rules = Rules(added_ids)
    breaks = f" {rules.terminal(_BREAKS)}?" if reasoning.has_breaks else ""
    thought = f"{rules.text_until(reasoning.closing, reasoning.marks)}{breaks}"
    if not reasoning.is_open:
        thought = f"({rules.sequence(reasoning.opening, reasoning.marks)} {thought})?"
    head = f" {rules.sequence(reasoning.head, reasoning.marks)}" if has_head and reasoning.head else ""
    return msgspec.structs.replace(grammar, before=rules.grammar("before", f"{thought}{head}", grammar.param))
