"""Templates read the texts of a request as plain ones, and never write a control token out of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import TemplateError
from server.text.chat_template import ChatTemplate
from server.text.request_text import RequestText

SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "</s>", "<unk>"]
PARTS = ["<", "<|", "|>", "<|en", "end", "/s>", " ", "\n", "the", "é漢", "s", *SPECIAL, "<|END|>", "<|end<|end|>|>"]
spelled = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)

# Each is what some template does to a message; the wanted text is jinja's own of plain strings.
EXPRESSIONS = [
    "{{ m }}",
    "{{ [m, m] }}",
    "{{ {'a': m} | string }}",
    "{{ m | tojson }}",
    "{{ m | tojson(ensure_ascii=true) }}",
    "{{ m | length }}",
    "{{ m == t }}",
    "{{ m[2:-1] }}",
    "{{ m[::-1] }}",
    "{{ m.split('<') }}",
    "{{ m.split() | join('-') }}",
    "{{ m ~ 1 ~ m }}",
    "{{ '<b>' ~ (m | safe) }}",
    "{{ '<b>' + m }}",
    "{{ m + '<b>' }}",
    "{{ m * 2 }}",
    "{{ m | upper }}",
    "{{ m | replace('<', '[') }}",
    "{{ '[x]' | replace('x', m) }}",
    "{{ '[x]'.replace('x', m) }}",
    "{{ m | trim }}",
    "{{ ', '.join([m, 'x', m]) }}",
    "{{ [m, m] | join(m) }}",
    "{{ m | title }}",
    "{{ m | indent(2) }}",
    "{{ m | e }}",
    "{% set x %}<{{ m }}>{% endset %}{{ x }}",
    "{% macro f(y) %}({{ y }}){% endmacro %}{{ f(m) }}",
    "{{ m.partition('|') }}",
    "{% filter upper %}{{ m }}{% endfilter %}",
    "{{ m | list | join }}",
    "{% for c in m %}{{ c }}{% endfor %}",
    "{{ m | first }}",
    "{{ m.strip('<').removeprefix('|') }}",
    "{{ m | default('x') }}",
    "{{ m.splitlines() | last }}",
    "{{ m | center(99) }}",
    "{{ messages[::2] | map(attribute='content') | join('|') }}",
    "{{ m | wordwrap(3) }}",
    "{{ m.title() }}",
    "{{ '%s' | string }}{{ m | reverse }}",
    "{{ m | string | safe }}",
    "{{ dict(a=m) }}",
    "{{ '[{}{{}}{}]'.format(m, 1) }}",
    "{{ '[{a}{1}]'.format(0, m, a=m) }}",
    "{{ m.format(1) }}",
    "{{ namespace(a=m).a }}",
    "{{ [m] | first | truncate(5) }}",
    "{{ (m, 1) }}",
    "{{ m | last }}",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@settings(deadline=None, max_examples=8)
@given(text=spelled)
def test_templates_read_texts_of_requests_like_any_others(expression: str, text: str) -> None:
    template = ChatTemplate("{% set m = messages[0].content %}{% set t = messages[1].content %}" + expression, {})
    plain, wrapped = (
        [{"content": kind(text)}, {"content": text}, {"content": kind("end")}] for kind in (str, RequestText)
    )
    try:
        wanted: str | None = template.render(plain)
    except TemplateError:
        wanted = None
    if wanted is None:
        with pytest.raises(TemplateError):
            template.render(wrapped)
        return
    found = template.render(wrapped)
    assert str.__str__(found) == wanted
    # Whoever wrote the text, no special token of it is the template's.
    if any(special in wanted for special in SPECIAL) and not isinstance(found, RequestText):
        pytest.fail("nothing of it counts as the request's")
    for start, end in found.template_runs() if isinstance(found, RequestText) else ():
        assert not any(special in wanted[start:end] for special in SPECIAL)
