"""Edits of a conversation that a request asks for by `context_management`, before it becomes a prompt.

Source: https://platform.claude.com/docs/en/build-with-claude/context-editing
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from server.errors import UnsupportedField
from server.http.anthropic.requests import (
    Block,
    ClearThinking,
    ClearToolUses,
    Compact,
    CountTokensRequest,
    RedactedThinkingBlock,
    ThinkingBlock,
    ThinkingTurns,
    ToolResultBlock,
    ToolUseBlock,
    Trigger,
    Turn,
)

PLACEHOLDER = "[The result of this tool was cleared.]"
FieldsT = TypeVar("FieldsT", bound=CountTokensRequest)


@dataclass(frozen=True, slots=True)
class Edited(Generic[FieldsT]):
    """A request whose conversation is edited."""

    fields: FieldsT
    applied: list[dict[str, Any]]  # the edits that changed it, as Anthropic's answers have them
    num_original_tokens: int | None  # of the prompt before the edits; None where nothing had to be counted


def edited(fields: FieldsT, count: Callable[[FieldsT], int]) -> Edited[FieldsT]:
    """Apply the edits of a request that save tokens, in their order. Raises UnsupportedField for a compaction due.

    count  returns the tokens that a request has as a prompt; called only where an edit depends on them
    """
    applied: list[dict[str, Any]] = []
    original = num_tokens = None
    management = fields.context_management
    for i, edit in enumerate([] if management is None else management.edits):
        if isinstance(edit, ClearThinking):
            turns, what = _without_thinking(fields.messages, edit)
        elif isinstance(edit, ClearToolUses):
            turns, what = _without_results(fields.messages, edit)
        else:
            turns, what = fields.messages, {}
        if not what and not isinstance(edit, Compact):
            continue
        if num_tokens is None:
            original = num_tokens = count(fields)
        if isinstance(edit, Compact):
            _refuse_if_due(edit, num_tokens, f"context_management.edits[{i}]")
            continue
        if isinstance(edit, ClearToolUses) and not _is_due(edit.trigger, num_tokens, fields.messages):
            continue
        candidate = fields.model_copy(update={"messages": turns})
        num_left = count(candidate)
        least = edit.clear_at_least if isinstance(edit, ClearToolUses) else None
        if num_tokens - num_left < max(1, 0 if least is None else least.value):
            continue
        applied.append({"type": edit.type, **what, "cleared_input_tokens": num_tokens - num_left})
        fields, num_tokens = candidate, num_left
    return Edited(fields, applied, original)


def _refuse_if_due(edit: Compact, num_tokens: int, place: str) -> None:
    if num_tokens > edit.trigger.value:
        raise UnsupportedField(
            f"{place}: the type {edit.type!r} is not implemented, and the prompt has {num_tokens} tokens, more than "
            f"its trigger of {edit.trigger.value}; send a shorter conversation or a higher trigger.",
            param=f"{place}.type",
        )


def _is_due(trigger: Trigger, num_tokens: int, turns: Sequence[Turn]) -> bool:
    return (len(_uses(turns)) if trigger.type == "tool_uses" else num_tokens) > trigger.value


def _without_thinking(turns: Sequence[Turn], edit: ClearThinking) -> tuple[list[Turn], dict[str, Any]]:
    """The turns without the thinking of all but the last ones of the assistant.

    One of the assistant's turns goes on behind results of tools: it ends where the user says something.
    """
    if not isinstance(edit.keep, ThinkingTurns):
        return list(turns), {}
    number, numbers = 0, []  # of the assistant's turn that each message is part of
    for turn in turns:
        number += turn.role != "assistant" and not _is_results(turn)
        numbers.append(number)
    thinking = {it for it, turn in zip(numbers, turns, strict=True) if any(map(_is_thinking, _blocks(turn)))}
    cleared = set(sorted(thinking)[: -edit.keep.value])
    if not cleared:
        return list(turns), {}
    kept = [
        _with_blocks(turn, [block for block in _blocks(turn) if not _is_thinking(block)]) if it in cleared else turn
        for it, turn in zip(numbers, turns, strict=True)
    ]
    return kept, {"cleared_thinking_turns": len(cleared)}


def _without_results(turns: Sequence[Turn], edit: ClearToolUses) -> tuple[list[Turn], dict[str, Any]]:
    """The turns without the results of the first calls, and perhaps without their arguments."""
    uses = _uses(turns)
    num_old = max(0, len(uses) - edit.keep.value)
    old = [use for use in uses[:num_old] if use.name not in edit.exclude_tools]
    of_inputs = edit.clear_tool_inputs
    emptied = {use.id for use in old if (of_inputs is True or (isinstance(of_inputs, list) and use.name in of_inputs))}
    ids = {use.id for use in old}
    cleared: set[str] = set()

    def without(block: Block) -> Block:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in ids and block.content != PLACEHOLDER:
            cleared.add(block.tool_use_id)
            return block.model_copy(update={"content": PLACEHOLDER, "is_error": False})
        if isinstance(block, ToolUseBlock) and block.id in emptied and block.input:
            cleared.add(block.id)
            return block.model_copy(update={"input": {}})
        return block

    changed = [_with_blocks(turn, [without(block) for block in _blocks(turn)]) for turn in turns]
    return changed, {"cleared_tool_uses": len(cleared)} if cleared else {}


def _blocks(turn: Turn) -> Sequence[Block]:
    return [] if isinstance(turn.content, str) else turn.content


def _with_blocks(turn: Turn, blocks: list[Block]) -> Turn:
    return turn if isinstance(turn.content, str) else turn.model_copy(update={"content": blocks})


def _uses(turns: Sequence[Turn]) -> list[ToolUseBlock]:
    return [block for turn in turns for block in _blocks(turn) if isinstance(block, ToolUseBlock)]


def _is_thinking(block: Block) -> bool:
    return isinstance(block, ThinkingBlock | RedactedThinkingBlock)


def _is_results(turn: Turn) -> bool:
    blocks = _blocks(turn)
    return bool(blocks) and all(isinstance(block, ToolResultBlock) for block in blocks)
