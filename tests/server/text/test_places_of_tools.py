"""Tools and calls stand in a prompt where a template has no place for them, too, as the model has written them."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from server.http.chat.rendering import Conversation, chat_text
from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.deltas import whole_answer
from server.text.answer.syntax import choose_syntax
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
FUNCTION = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = {"city": "Zü\"rich'", "days": 5, "wet": True, "at": None, "places": ["a", {"b": False}]}
CALLS = [
    {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
    {"id": "functions.weather:1", "type": "function", "function": {"name": "weather", "arguments": {}}},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "No.", "tool_call_id": "functions.weather:0"},
]


def prompt_of(source: str, messages: list[dict[str, Any]]) -> str:
    template = ChatTemplate(source, {})
    syntax = choose_syntax(template, ToolCallParser.AUTO, ReasoningParser.AUTO)
    assert syntax.has_tool_template
    tools = [{"type": "function", "function": FUNCTION}]
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({}, [])), template)
    return str.__str__(chat_text(tokenizer, template, Conversation(messages, tools), syntax=syntax))


@pytest.mark.parametrize(
    "marks",
    [
        "<|start_of_role|><|tool_call|>",
        "<|tool_list_start|><|tool_list_end|>",
        "<|im_system|>tool_declare<|im_middle|>",
        "functools[",
        '<tool_call>{{ {"name": 1, "arguments": 2} }}',
        "<|tool|><|/tool|>",
    ],
)
def test_calls_stand_in_the_text_as_the_model_writes_them(marks: str) -> None:
    source = f"{{{{ tools | tojson }}}}{marks}" + TURNS
    prompt = prompt_of(source, CONVERSATION)
    written = prompt.partition("[assistant]")[2].removesuffix("[tool]No.")
    syntax = choose_syntax(ChatTemplate(source, {}), ToolCallParser.AUTO, ReasoningParser.AUTO)
    parser = syntax.parser({"weather": {}}, "", is_streamed=False)
    assert parser is not None
    answer = whole_answer([*parser.feed(written), *parser.finish()])
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    assert calls == [("weather", ARGUMENTS), ("weather", {})]
    assert not answer.content


@pytest.mark.parametrize("text", ["", "Let me see."])
def test_calls_stand_in_a_template_that_has_them_where_a_message_has_no_text(text: str) -> None:
    call = "{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}"
    calls = f"{{% for c in m['tool_calls'] %}}<｜tool▁calls▁begin｜>{call}{{% endfor %}}"
    said = f"{{% if m['content'] is none %}}{calls}{{% else %}}{{{{ m['content'] }}}}{{% endif %}}"
    messages = [it | {"content": text} if it["role"] == "assistant" else it for it in CONVERSATION]
    prompt = prompt_of(f"{{% for m in messages %}}[{{{{ m['role'] }}}}]{said}{{% endfor %}}", messages)
    assert f"[assistant]{text}<｜tool▁calls▁begin｜>" in prompt
    assert prompt.count(f"weather<｜tool▁sep｜>{json.dumps(ARGUMENTS, ensure_ascii=False)}") == 1


def test_a_message_without_text_stays_so_in_a_template_that_has_calls_nowhere() -> None:
    """A copy of Cohere's asks for tool_calls alone, and says None of a null."""
    mark = "{% if m['tool_calls'] %}<｜tool▁calls▁begin｜><｜tool▁sep｜>{% endif %}"
    prompt = prompt_of(f"{{% for m in messages %}}{mark}[{{{{ m['content'] }}}}]{{% endfor %}}", CONVERSATION)
    assert "[]" in prompt
    assert "None" not in prompt


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_tools_are_described_for_a_template_that_has_calls_alone(system: list[dict[str, Any]]) -> None:
    """DeepSeek V3.1's, as published: calls in the model's form, and no word of tools."""
    call = (
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>"
    )
    calls = f"<｜tool▁calls▁begin｜>{{% for c in m['tool_calls'] %}}{call}{{% endfor %}}<｜tool▁calls▁end｜>"
    source = TURNS.replace("{% endfor %}", f"{{% if 'tool_calls' in m %}}{calls}{{% endif %}}{{% endfor %}}")
    prompt = prompt_of(source, [*system, *CONVERSATION])
    before, _, after = prompt.partition("[user]Rain?[assistant]")
    assert before.startswith("[system]Be brief.\n\n" if system else "[system]# Tools")
    assert json.dumps({"type": "function", "function": FUNCTION}) in before
    assert "<tool_call>" not in prompt
    syntax = choose_syntax(ChatTemplate(source, {}), ToolCallParser.AUTO, ReasoningParser.AUTO)
    assert syntax.calls is ToolCallParser.DEEPSEEK_V31
    for text, called in ((before, ["function_name"]), (after, ["weather", "weather"])):
        parser = syntax.parser({"weather": {}}, "", is_streamed=False)
        assert parser is not None
        answer = whole_answer([*parser.feed(text), *parser.finish()])
        assert [call.name for call in answer.calls] == called


@pytest.mark.parametrize(
    "messages", [CONVERSATION[:1], [{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]]]
)
def test_tools_stand_in_the_system_message_of_phi(messages: list[dict[str, Any]]) -> None:
    source = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if 'tools' in m and m['tools'] is not none %}"
        "<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}{% endfor %}"
    )
    prompt = prompt_of(source, messages)
    assert prompt.startswith("[system]Be brief.<|tool|>" if len(messages) > 1 else "[system]You are")
    assert json.loads(prompt.partition("<|tool|>")[2].partition("<|/tool|>")[0]) == [FUNCTION]


def test_arguments_are_text_for_a_template_that_joins_them() -> None:
    source = "{{ tools }}>>>all{% for m in messages %}{% for c in m.tool_calls %}{{ '' + c.function.arguments }}"
    prompt = prompt_of(source + "{% endfor %}{% endfor %}", CONVERSATION)
    assert prompt.endswith(json.dumps(ARGUMENTS, ensure_ascii=False) + "{}")
