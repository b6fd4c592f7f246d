"""Chat templates render as their models were trained on, and hostile ones cost an error."""

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.errors import ModelError, TemplateError
from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.syntax import choose_syntax
from server.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from server.text.request_text import RequestText

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yes"}]


def render(source: str, messages: list[dict[str, Any]] = MESSAGES, *, opens: bool = True) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=opens)


def test_messages_and_special_tokens_are_rendered() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert render(source) == "<s>[user]Hi <b>[assistant]Yes[assistant]"
    assert render(source, opens=False) == "<s>[user]Hi <b>[assistant]Yes"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<a>' ~ ('b<' | safe) }}{{ ('<a>' | safe) ~ '<b>' ~ m }}{{ m ~ (m | safe) }}",
        "{{ '<a>' + ('b' | safe) }}{{ ('<a>' | safe) + '<b>' }}{{ (m | safe) + '<b>' }}{{ '<b>' + (m | safe) }}",
        "{{ ('<a>' | safe) + m }}{{ m | e }}{{ ('<a>' | safe).join(['<', m]) }}{{ m | safe | upper }}",
        "{{ [m | safe, '<'] | join }}{{ ('<a>' ~ m | safe) == '<a>' ~ m }}{{ ('a' ~ m | safe).startswith('a') }}",
        "{{ [m] | string }}{{ [m] }}{{ {'a': m} }}{{ [m] | tojson(true) }}{{ m | length }}{{ m == 'Hi <b>' }}",
        "{{ m[1:4] }}{{ m[::-1] }}{{ m[-1] }}{{ m.split() }}{{ m.split(' ')[1] }}{{ m.rsplit('<', 1) }}{{ m * 2 }}",
        "{{ [m] | tojson(indent='  ') }}{{ m.partition(' ')[2] }}{{ m | replace('b', m) }}{{ m.replace('', '-') }}",
        "{% generation %}{% set m = 'x' %}{{ m }}{% endgeneration %}{{ m }}",
        "{% for c in m %}{{ c }}.{% endfor %}{{ m | list }}{{ m | first }}{{ m | title }}{{ m.splitlines() }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(m) | upper }}{% filter trim %} {{ m }} {% endfilter %}",
        "{{ m.removeprefix('Hi') }}{{ m.removesuffix('>') }}{{ m.strip('H') }}{{ m | center(9) }}{{ m | wordwrap(3) }}",
        "{% generation %}{{ [messages[0], 'é'] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
        "{% endgeneration %}{{ messages[0] | tojson }}{{ 'a' ~ (1 + 2) ~ 'b' }}{{ 'x' * 3 }}{{ ' t ' | trim }}",
        "{% for x in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ x.content }}\n{% endfor %}",
        "{{ '%s' | e }}{{ m | truncate(3) }}{{ m | indent(2, true) }}{{ m | default('d') }}{{ none ~ m ~ 1.5 ~ true }}",
    ],
)
def test_texts_of_a_request_render_as_by_transformers(source: str) -> None:
    source = "{% set m = messages[0].content %}" + source
    [[expected], _] = render_jinja_template([MESSAGES], chat_template=source)
    guarded = [{"role": it["role"], "content": RequestText(it["content"])} for it in MESSAGES]
    assert render(source) == expected
    assert render(source, guarded) == expected


DOUBLING = "{% set ns = namespace(x='a' * 90000) %}{% for i in range(30) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"
LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        *[(DOUBLING.replace("OP", operator), "the limit is 16000000") for operator in "+~"],
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "more than 100 deep"),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "more than 100 deep"),
        (LOOPS, "more than 2 s"),
    ],
)
def test_a_template_that_refuses_or_does_not_end_is_an_error(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render(source)


def test_macros_may_nest_as_deeply_as_a_schema() -> None:
    nested = "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    assert render(nested + "{{ f(90) }}" * 20) == "".join(map(str, range(90, -1, -1))) * 20


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 1000000000",
        "[0] * 1000000000",
        "1000000000 * 'a'",
        "'%01000000000d' % 1",
        "'{:1000000000}'.format(1)",
        "'a'.ljust(1000000000)",
        "'a' | center(1000000000)",
        "'%1000000000s' | format(1)",
        "range(1000000000)",
        "2 ** 1000000000",
        "('a' * 90000).replace('a', 'b' * 90000)",
        "('a' * 90000) | join('b' * 90000)",
        "('a' * 90000).join('b' * 90000)",
        "(['a' * 90000] * 90000) | join",
        "([['a' * 90000] * 90000] | map('string')) | list",
        "(['a' * 90000] * 90000) | tojson",
        "{'x': ['a' * 90000] * 90000} | pprint",
        "('\\n' * 90000) | indent(9000)",
        "('\\t' * 90000).expandtabs(9000)",
        "('a' * 90000).translate({97: 'b' * 90000})",
        "[] | tojson(indent=1000000)",
        "''.__class__.__mro__",
        "messages.append(1)",
    ],
)
def test_a_hostile_expression_is_refused_before_it_takes_memory(expression: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            render("{{ (" + expression + ") }}")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**24


def test_a_message_of_several_megabytes_is_rendered() -> None:
    content = "line\n" * 1_500_000
    assert render("{{ messages[0].content | trim }}!", [{"role": "user", "content": content}]) == content.strip() + "!"


def test_the_deadline_leaves_no_trace_function() -> None:
    before = sys.gettrace()
    render("x")
    assert sys.gettrace() is before


def test_a_template_that_fails_on_a_missing_field_names_no_text() -> None:
    with pytest.raises(TemplateError) as caught:
        render("{{ messages[0].content + messages[0].missing.deeper }}")
    assert "Hi <b>" not in caught.value.message


TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain", "tools"),
        ({"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"}, "plain", "tools"),
        ({"chat_template.jinja": "plain", "additional_chat_templates/rag.jinja": "rag"}, "plain", "plain"),
        ({"chat_template.jinja": "plain", "tokenizer_config.json": {"chat_template": NAMED}}, "plain", "plain"),
        ({"tokenizer_config.json": {"chat_template": NAMED[1:]}}, None, "tools"),
        ({"chat_template.json": {"chat_template": "plain"}}, "plain", "plain"),
    ],
)
def test_named_templates_are_chosen_by_tools(
    tmp_path: Path, files: dict[str, Any], plain: str | None, with_tools: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(MESSAGES, tools=TOOLS) == with_tools
    if plain is None:
        with pytest.raises(TemplateError, match="no default chat template, only named ones: tool_use; tool_use needs"):
            template.render(MESSAGES)
    else:
        assert template.render(MESSAGES) == plain


def test_the_tool_template_shows_the_format_of_calls() -> None:
    template = ChatTemplate("{{ '<think>' }}", {}, tool_source="{{ tools }}<tool_call>{'arguments': 1, \"arguments\"}")
    syntax = choose_syntax(template, ToolCallParser.AUTO, ReasoningParser.AUTO)
    assert (syntax.calls, syntax.reasoning) == (ToolCallParser.HERMES, ReasoningParser.THINK)
    assert syntax.has_tool_template


def test_special_tokens_of_all_files_are_variables(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ image_token }}"
    config = {"chat_template": source, "extra_special_tokens": {"image_token": "<image>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "<s><image>"


def test_a_template_is_found_in_config_list_and_file(tmp_path: Path) -> None:
    def load(config: dict[str, Any]) -> str | None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        template = ChatTemplate.load(tmp_path)
        return None if template is None else template.render([])

    assert load({}) is None
    assert load({"chat_template": "{{ eos_token }}", "eos_token": {"content": "</s>"}}) == "</s>"
    assert load({"chat_template": [{"name": "default", "template": "named"}]}) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load({"chat_template": "config"}) == "file"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read: "),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json: cannot be read as JSON: "),
        ("tokenizer_config.json", b"[" * 200_000 + b"]" * 200_000, "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_template_stops_the_start(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("source", ["{% for %}", "{{ " + "(" * 3000, "x" * (MAX_TEMPLATE_CHARS + 1)])
def test_a_template_that_cannot_be_used_stops_the_start(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, {})


def test_the_filter_format_fills_plain_places() -> None:
    template = ChatTemplate("{{ 'a=%s, b=%s%%' | format(messages[0].content, [1, true]) }}", {})
    assert template.render([{"role": "user", "content": "x %s"}]) == "a=x %s, b=[1, True]%"
