"""The pages at / and /docs in a real browser, before an API whose engine follows a script."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.vocabulary.buckets import Bucket
from qualification.decision.decision import Status
from server.edge.keys import ApiKeys, Keys
from server.http.app import create_admin_app
from server.model.load.pooling import PoolingModel
from server.protocol.messages import AttestationReport, AttestedBatch, ExplainedTime, FinishReason, Heartbeat
from server.settings import Task
from server.supervisor.client import EngineState
from server.supervisor.streams import error_delta
from support.api.edge_fakes import END, Script, Served, delta, playing, saying, served, with_model, write_tokenizer
from support.api.running_api import Running, wait_until
from support.e2e.browser import Tab, browsing, find_browser
from support.images.served_images import picture, served_images, write_model

pytestmark = pytest.mark.e2e

ENTER, TAB, ESCAPE = ("Enter", 13, "\r"), ("Tab", 9, ""), ("Escape", 27, "")
AXE = Path(__file__).resolve().parents[1] / "support" / "e2e" / "axe" / "axe.min.js"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
EXPLAINED = ExplainedTime(0.975, {"evidence": 0.975, "unexplained": 0.025}, {}, {"planted": 0.025})
ATTESTED = AttestedBatch("decode", ["triton.decode"], True, {}, "match", None, EXPLAINED)
TOOLS = (
    '{% for tool in tools or [] %}[tool]{{ tool | tojson }}{% endfor %}{# "arguments" #}'
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endfor %}[assistant]"
)
ANSWER = """# Two *ways*

| way | cost |
| --- | ---: |
| `a` | 1 &lt; 2 |

- first **bold**
- [a link](https://example.com/x) and [no link](javascript:alert(1))

```python
print("<b>")
```

![picture](https://example.com/x.png)
"""
IS_READY = "document.getElementById('state').textContent === 'ready'"

Start = Callable[..., Running]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_browser()
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    with browsing(program, tmp_path_factory.mktemp("profile")) as it:
        yield it


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an API; `script` plays to every request."""
    write_tokenizer(tmp_path)
    started = []

    def begin(
        script: Script | None = None,
        *,
        keys: Keys | None = None,
        is_admin: bool = False,
        pooling: PoolingModel | None = None,
        of: Served | None = None,
        template: str | None = None,
        **settings: object,
    ) -> Running:
        if template is not None:
            write_tokenizer(tmp_path, template=template)
        it = of or served(tmp_path, script, **settings)
        if pooling is not None:
            it = Served(with_model(it.services, pooling=pooling), it.engine)
        it.engine.last_heartbeat = Heartbeat(1, math.inf, 0, 0)  # or it would be late after 5 s
        it.engine.attestations.put(AttestationReport("start", "match", 12.5, 0.1, [ATTESTED], [], id="0af1"))
        options = {} if keys is None else {"keys": keys}
        app = create_admin_app(replace(it.services)) if is_admin else None
        started.append(Running(it, app=app, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for it in started:
        it.stop()


def open_page(tab: Tab, it: Running, **options: object) -> None:
    tab.open(it.url + "/", **options)  # type: ignore[arg-type]
    if tab.value("sessionStorage.length + localStorage.length"):  # of an earlier server on this port
        tab.value("sessionStorage.clear(); localStorage.clear()")
        tab.open(it.url + "/?again", **options)  # type: ignore[arg-type]


def ask(tab: Tab, text: str) -> None:
    """Type as with a keyboard: the message box, the text, Enter."""
    tab.value("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press(*ENTER)
    tab.wait_for("!running && document.querySelector('#messages .message:last-child .proof').textContent")


def test_the_chat_shows_text_as_text_with_its_kernels(tab: Tab, start: Start) -> None:
    it = start(playing(delta(HOSTILE, is_first=True), delta(" end"), delta("", FinishReason.STOP)))
    open_page(tab, it)
    tab.wait_for(IS_READY)
    ask(tab, "Hi")
    shown = tab.text("messages")
    assert HOSTILE + " end" in shown
    assert "provisional" in shown
    assert "prefill sdpa.math" in shown
    assert "fallback: head_dim" in shown
    assert re.search(r"TTFT [\d.]+ ms in the server", shown)
    assert "tokens a second" in shown
    assert "attestation 0af1 match" in shown
    assert tab.value("document.querySelectorAll('#messages img, #messages b').length") == 0
    assert tab.value("document.title") == "Hallmark"
    assert tab.exceptions == []


def test_the_page_shows_the_plan_and_figures_of_what_it_did(tab: Tab, start: Start) -> None:
    it = start(playing(delta("a", is_first=True), delta("b"), delta("", FinishReason.STOP)))
    open_page(tab, it)
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    assert "from sdpa.cpu: head_dim" in tab.text("shapes")
    assert tab.value("document.querySelectorAll('#shapes tr.fallback').length") == 1
    assert "1 fallback" in tab.text("plan-summary")
    ask(tab, "Hi")
    tab.wait_for("/le_128\\s+1\\s+[\\d.]+ ms/.test(document.getElementById('ttft').innerText)")
    assert "match" in tab.text("attestation")
    assert "decode 97.5%" in tab.text("attestation")
    assert "decode ran kernels that no list names: planted" in tab.text("attestation")
    assert "/v1/chat/completions" in tab.text("curl")
    assert "tiny" in tab.text("python")


def test_a_server_of_embeddings_offers_embeddings(tab: Tab, start: Start) -> None:
    open_page(tab, start(pooling=PoolingModel(Task.EMBED)))
    tab.wait_for("!document.getElementById('chat-note').hidden")
    assert "served for embeddings" in tab.text("chat-note")
    assert tab.value("document.getElementById('chat-form').hidden")
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    assert "/v1/embeddings" in tab.text("curl")
    assert "client.embeddings.create" in tab.text("python")
    assert "chat" not in tab.text("snippets")
    assert tab.exceptions == []


def test_an_error_in_a_stream_is_shown_by_its_message(tab: Tab, start: Start) -> None:
    it = start(playing(delta("half", is_first=True), error_delta("", "engine_died", "The engine died.")))
    open_page(tab, it)
    tab.wait_for(IS_READY)
    ask(tab, "Hi")
    assert "half" in tab.text("messages")
    assert "The engine died" in tab.text("messages")


def test_each_key_opens_its_part_of_the_page(tab: Tab, start: Start) -> None:
    it = start(keys=Keys(ApiKeys(["key-of-a-user"]), ApiKeys(["key-of-an-operator"])))
    open_page(tab, it)
    tab.wait_for("document.getElementById('chat-note').innerText.includes('needs an API key')")
    tab.wait_for("document.getElementById('plan-note').innerText.includes(\"need an operator's key\")")
    use_keys(tab, user="wrong")
    tab.wait_for("document.getElementById('chat-note').innerText.includes('not valid')")
    use_keys(tab, user="key-of-a-user")
    tab.wait_for("!document.getElementById('chat-form').hidden")
    ask(tab, "Hi")
    assert "Hello" in tab.text("messages")
    assert "Authorization: Bearer" in tab.text("curl")
    assert "key-of-a" not in tab.value("document.documentElement.outerHTML")
    use_keys(tab, operator="key-of-an-operator")
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    assert tab.exceptions == []


def use_keys(tab: Tab, *, user: str = "", operator: str = "") -> None:
    for id_, key in (("user-key", user), ("operator-key", operator)):
        tab.value(f"document.getElementById({id_!r}).value = {key!r}")
    tab.value("document.querySelector('#keys-form button').click()")


def test_a_tenants_key_is_refused_the_operators_plan(tab: Tab, start: Start) -> None:
    it = start(keys=Keys(ApiKeys(["mine"])))
    open_page(tab, it)
    tab.wait_for("document.getElementById('chat-note').innerText.includes('needs an API key')")
    use_keys(tab, user="mine", operator="mine")
    tab.wait_for("document.getElementById('plan-note').innerText.includes(\"needs an operator's key\")")


def test_the_banner_says_why_the_server_is_not_ready(tab: Tab, start: Start) -> None:
    it = start()
    it.it.engine.state = EngineState.STARTING
    open_page(tab, it)
    tab.wait_for("document.getElementById('banner').innerText.includes('The engine is starting.')")
    assert tab.value("document.getElementById('send').disabled")
    it.it.engine.state = EngineState.RESTARTING
    tab.wait_for("document.getElementById('state').textContent === 'engine died'")
    it.it.engine.state = EngineState.READY
    tab.wait_for(IS_READY)
    assert tab.value("document.getElementById('banner').hidden")


def test_with_an_admin_port_the_page_says_where_the_plan_is(tab: Tab, start: Start) -> None:
    api = start(admin_port=9000)
    open_page(tab, api)
    tab.wait_for("document.getElementById('plan-note').innerText.includes('admin port, 9000')")
    assert not tab.value("document.getElementById('chat-form').hidden")
    admin = start(admin_port=9000, is_admin=True)
    open_page(tab, admin)
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    assert "on the API's port" in tab.text("chat-note")


@pytest.mark.parametrize("is_dark", [False, True])
def test_the_page_fits_a_phone_in_light_and_dark(tab: Tab, start: Start, is_dark: bool) -> None:
    it = start()
    open_page(tab, it, width=360, height=780, is_dark=is_dark)
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    ask(tab, "x" * 200)
    assert tab.value("document.documentElement.scrollWidth") <= 360
    assert tab.value("(it => it.scrollWidth <= it.clientWidth)($('ttft').closest('.wide'))")
    dark = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
    assert dark is is_dark


def test_quantiles_are_read_as_prometheus_reads_them(tab: Tab, start: Start) -> None:
    open_page(tab, start())
    for q, steps, expected in (
        (0.5, "[[0.1, 5], [0.2, 10], [Infinity, 10]]", 0.1),
        (0.99, "[[0.1, 5], [0.2, 10], [Infinity, 10]]", 0.198),
        (0.99, "[[0.1, 0], [0.2, 1], [Infinity, 10]]", 0.2),  # beyond the last edge
        (0.5, "[[0.1, 0], [Infinity, 0]]", None),
    ):
        found = tab.value(f"quantile({steps}, {q})")
        assert found == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("is_by_key", [False, True])
def test_stop_keeps_what_has_come_of_an_answer(tab: Tab, start: Start, is_by_key: bool) -> None:
    it = start(playing(delta("begun", is_first=True), delta(" and ended"), delta("", FinishReason.STOP)))
    it.it.engine.gate.clear()
    it.it.engine.num_free = 1
    open_page(tab, it)
    tab.wait_for(IS_READY)
    tab.value("document.getElementById('prompt').focus()")
    tab.type("Hi")
    tab.press(*ENTER)
    tab.wait_for("document.getElementById('messages').innerText.includes('begun')")
    tab.type("Next")
    tab.press(*ENTER)  # waits for the answer's end, and stays when it is stopped
    if is_by_key:
        tab.press(*ESCAPE)
    else:
        tab.value("document.getElementById('stop').click()")
    tab.wait_for("!running && document.getElementById('said').innerText === 'Stopped.'")
    it.it.engine.gate.set()
    wait_until(lambda: not it.it.services.lifecycle.num_inflight)
    assert "begun" in tab.text("messages")
    assert "and ended" not in tab.text("messages")
    assert tab.value("document.getElementById('prompt').value") == "Next"


def test_a_hidden_page_asks_for_nothing(tab: Tab, start: Start) -> None:
    it = start()
    open_page(tab, it)
    tab.wait_for(IS_READY)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tab.value(
        hide % "true" + "document.dispatchEvent(new Event('visibilitychange')); performance.clearResourceTimings()"
    )
    tab.value("new Promise(done => setTimeout(done, 500)).then(() => performance.clearResourceTimings())")
    tab.wait_for("timer === null")  # which it was for the next questions
    assert tab.value("performance.getEntriesByType('resource').length") == 0
    tab.value(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait_for("performance.getEntriesByType('resource').length > 0")


def test_every_control_is_reached_by_the_tab_key(tab: Tab, start: Start) -> None:
    it = start()
    open_page(tab, it)
    tab.wait_for(f"{IS_READY} && !document.getElementById('figures-body').hidden")
    seen = set()
    for _ in range(40):
        tab.press(*TAB)
        seen.add(tab.value("document.activeElement.id || document.activeElement.tagName"))
    assert {
        "prompt", "send", "clear", "max-tokens", "temperature", "window", "only-fallbacks", "SUMMARY", "BUTTON",
    } <= seen  # fmt: skip


OPEN_ALL = "document.querySelectorAll('details:not([open])').forEach(it => { it.open = true; })"


def prompts_of(it: Running) -> list[str]:
    """Return the prompts that the engine got, in order."""
    return [bytes(token_id for token_id in ids if token_id < END).decode() for _, ids, *_ in it.it.engine.submitted]


def press_button(tab: Tab, text: str) -> None:
    """Press the last button of the messages with this text."""
    tab.value(f"[...document.querySelectorAll('#messages button')].findLast(it => it.textContent === {text!r}).click()")


IS_ANSWERED = "!running && conversation.length && conversation.at(-1).role === 'assistant'"


def test_an_answer_is_markdown_and_none_of_its_html(tab: Tab, start: Start) -> None:
    it = start(saying(ANSWER, HOSTILE))
    open_page(tab, it)
    tab.wait_for(IS_READY)
    ask(tab, "Hi")

    def found(selector: str) -> list[str]:
        texts: list[str] = tab.value(f"[...document.querySelectorAll('.answer {selector}')].map(it => it.innerText)")
        return texts

    assert found("h3") == ["Two ways"]
    assert found("td") == ["a", "1 < 2"]
    assert found("li strong") == ["bold"]
    assert found("pre code") == ['print("<b>")']
    assert found("a") == ["a link", "picture"]
    assert "[no link](javascript:alert(1))" in tab.text("messages")
    assert HOSTILE in tab.text("messages")
    assert tab.value("document.querySelectorAll('.answer :is(img, b, script, iframe)').length") == 0
    rel, target = tab.value("(it => [it.rel, it.target])(document.querySelector('.answer a'))")
    assert "noopener" in rel
    assert target == "_blank"
    assert tab.exceptions == []


def test_no_text_is_too_odd_for_the_chat(tab: Tab, start: Start) -> None:
    open_page(tab, start())
    tab.wait_for(IS_READY)
    for text in ("> " * 5000, "- " * 5000, "*a **b " * 3000, "[" * 9000, "`" * 8001, "&#0;&#xFFFFFF;"):
        tab.value("window.began = performance.now(); 0")
        tab.value(f"document.body.append(...markdown({text!r}))")
        took_ms = tab.value("performance.now() - window.began")
        assert took_ms < 10_000, text[:10]
    assert tab.exceptions == []


def test_a_chat_outlives_a_reload_until_it_is_cleared(tab: Tab, start: Start) -> None:
    it = start(saying("An *answer*."))
    open_page(tab, it)
    tab.wait_for(IS_READY)
    tab.value("document.getElementById('system').value = 'Be brief.'")
    ask(tab, "Hi")
    tab.open(it.url + "/?reloaded")
    tab.wait_for(IS_READY)
    assert "An answer." in tab.text("messages")
    assert "provisional" in tab.text("messages")
    ask(tab, "More")
    assert prompts_of(it)[-1] == "[system]Be brief.[user]Hi[assistant]An *answer*.[user]More[assistant]"
    tab.value("document.getElementById('clear').click()")
    tab.open(it.url + "/?cleared")
    assert tab.value("conversation.length") == 0
    assert "Ask something" in tab.text("messages")


def test_what_is_kept_of_a_chat_is_bounded(tab: Tab, start: Start) -> None:
    it = start()
    open_page(tab, it)
    tab.value(
        "for (let i = 0; i < 90; i++) conversation.push({role: 'user', content: 'q' + i},"
        " {role: 'assistant', content: 'x'.repeat(9999)}); saveChat()"
    )
    assert tab.value("localStorage.getItem(KEPT_AT).length") < 450_000
    tab.open(it.url + "/?reloaded")
    first, last = tab.value("[conversation[0].content, conversation.at(-2).content]")
    assert first.startswith("q")
    assert last == "q89"


def test_a_message_is_edited_and_an_answer_made_again(tab: Tab, start: Start) -> None:
    it = start(saying("Well."))
    open_page(tab, it)
    tab.wait_for(IS_READY)
    ask(tab, "One")
    ask(tab, "Two")
    press_button(tab, "Regenerate")
    tab.wait_for(IS_ANSWERED)
    assert prompts_of(it)[-1] == prompts_of(it)[-2]
    tab.value("[...document.querySelectorAll('#messages button')].find(it => it.textContent === 'Edit').click()")
    assert tab.value("document.getElementById('prompt').value") == "One"
    tab.press(*ESCAPE)
    assert tab.value("document.getElementById('prompt').value") == ""
    tab.value("[...document.querySelectorAll('#messages button')].find(it => it.textContent === 'Edit').click()")
    tab.value("document.getElementById('prompt').value = ''")
    ask(tab, "Three")
    assert prompts_of(it)[-1] == "[user]Three[assistant]"
    assert tab.value("conversation.length") == 2


def test_tool_calls_are_shown_and_their_results_sent(tab: Tab, start: Start) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'

    def script(prompt: list[int]) -> object:
        is_told = "[tool]Sun" in bytes(it for it in prompt if it < END).decode()
        return saying("It is sunny." if is_told else call)(prompt)

    it = start(script, template=TOOLS)
    open_page(tab, it)
    tab.wait_for(IS_READY)
    tab.value("document.getElementById('max-tokens').value = 64")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    tab.value("document.getElementById('tools').value = 'no JSON'")
    ask(tab, "Weather?")
    assert "no JSON array" in tab.text("messages")
    tab.value(
        f"document.getElementById('clear').click(), document.getElementById('tools').value = {json.dumps(tools)!r}"
    )
    ask(tab, "Weather?")
    assert "tool call" in tab.text("messages")
    assert '"city": "Bern"' in tab.text("messages")
    tab.value("document.querySelector('.call textarea').value = 'Sun'")
    press_button(tab, "Send results")
    tab.wait_for(IS_ANSWERED + " && !conversation.at(-1).calls.length")
    assert "It is sunny." in tab.text("messages")
    assert prompts_of(it)[-1].endswith("[user]Weather?[assistant]<tool_call>weather</tool_call>[tool]Sun[assistant]")


def test_a_dropped_image_goes_with_the_message(tab: Tab, start: Start, tmp_path: Path) -> None:
    it = start(of=served_images(write_model(tmp_path)))
    open_page(tab, it)
    tab.wait_for(IS_READY + " && seesImages")
    content = f"Uint8Array.from(atob({picture(112, 56).partition(',')[2]!r}), it => it.charCodeAt(0))"
    file = f"new File([{content}], 'a.png', {{type: 'image/png'}})"
    drop = "new DragEvent('drop', {dataTransfer: given, bubbles: true})"
    tab.value(
        f"given = new DataTransfer(), given.items.add({file}), document.getElementById('chat').dispatchEvent({drop})"
    )
    tab.wait_for("pictures.length === 1 && document.querySelector('#pictures img').naturalWidth === 112")
    ask(tab, "What?")
    assert [(len(images), images[0].num_tokens) for images in it.it.engine.images] == [(1, 18)]
    assert tab.value("document.querySelector('#messages .user img').naturalHeight") == 56
    assert tab.value("pictures.length") == 0
    tab.open(it.url + "/?again")
    tab.wait_for(IS_READY)
    assert "1 image(s), which the reload has dropped" in tab.text("messages")
    assert tab.exceptions == []


def test_words_of_the_page_explain_themselves(tab: Tab, start: Start) -> None:
    open_page(tab, start())
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    for bucket in Bucket:
        meaning = tab.value(f"meaningOf({bucket.label!r}).replaceAll(',', '')")
        edges = [str(bucket.lo + 1), str(bucket.hi)] if bucket.hi is not None else [str(bucket.lo)]
        assert re.findall(r"\d+", meaning) == edges, bucket
    for status in Status:
        assert status.value in tab.value("[...document.querySelectorAll('#plan-words dt')].map(it => it.textContent)")
    assert "1 to 128 tokens" in tab.value("document.querySelector('#shapes td[title]').title")
    assert "at its start" in tab.value("document.querySelector('#shapes .chip').title")


def test_the_chart_shows_first_tokens_over_time(tab: Tab, start: Start) -> None:
    open_page(tab, start())
    tab.wait_for("snapshots.length > 0")
    assert "No request in the last minute" in tab.text("chart")
    tab.wait_for(IS_READY)
    ask(tab, "Hi")
    tab.wait_for("document.querySelectorAll('#chart polyline').length")
    assert "le_128" in tab.value("document.querySelector('#chart svg').getAttribute('aria-label')")
    assert tab.text("chart").split()[-1] == "le_128"


@pytest.mark.parametrize(("width", "is_dark"), [(360, True), (1280, False)])
def test_axe_finds_nothing_on_the_pages(tab: Tab, start: Start, width: int, is_dark: bool) -> None:
    it = start(saying(ANSWER))
    open_page(tab, it, width=width, is_dark=is_dark)
    tab.wait_for("document.querySelectorAll('#shapes tr').length === 2")
    ask(tab, "Hi")
    tab.value(OPEN_ALL)
    tab.wait_for("document.querySelectorAll('#chart polyline').length")
    assert findings(tab) == []
    tab.open(it.url + "/docs", width=width, is_dark=is_dark)
    tab.wait_for("document.querySelectorAll('#routes > details').length > 0")
    tab.value("document.querySelectorAll('#routes > details')[1].open = true")
    tab.wait_for("document.querySelectorAll('.try').length")
    assert findings(tab) == []


def findings(tab: Tab) -> list[str]:
    """Return the violations that axe-core finds on the page as it is."""
    tab.value(AXE.read_text() + "; 0")
    found: list[str] = tab.value(
        "axe.run(document, {resultTypes: ['violations']}).then(it => it.violations.flatMap(rule =>"
        " rule.nodes.map(node => rule.id + ': ' + node.target.join(' ') + ': ' + node.failureSummary)))"
    )
    return found


def test_axe_finds_what_is_planted(tab: Tab, start: Start) -> None:
    open_page(tab, start())
    tab.value("document.body.append(make('input'))")
    assert [it.partition(":")[0] for it in findings(tab)].count("label") == 1


def test_docs_tries_a_route_and_writes_its_curl(tab: Tab, start: Start) -> None:
    it = start(saying("Once."))
    tab.open(it.url + "/docs")
    tab.wait_for("document.querySelectorAll('#routes > details').length > 0")
    tab.value(OPEN_ALL)
    tab.wait_for("document.querySelectorAll('.try').length === document.querySelectorAll('#routes > details').length")
    routes = tab.value("[...document.querySelectorAll('#routes > details summary code')].map(it => it.textContent)")
    commands = [
        shlex.split(text)
        for text in tab.value("[...document.querySelectorAll('.try pre:first-of-type')].map(it => it.textContent)")
    ]
    assert len(commands) > 20
    for command in commands:
        assert command[0] == "curl"
        [url] = [part for part in command if part.startswith(it.url)]
        assert url.removeprefix(it.url) in routes
    send = (
        "(it => { it.open = true; const part = it.querySelector('.try'); part.querySelector('button').click();"
        " return part; })([...document.querySelectorAll('#routes > details')].find(it =>"
        " it.querySelector('summary b').textContent === %r && it.querySelector('summary code').textContent === %r))"
    )
    answered = "/^\\d+ after/.test((%s).querySelector('[role=status]').textContent)"
    for method, path in (
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"),
        ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"),
        ("GET", "/v1/models"), ("GET", "/metrics"),
    ):  # fmt: skip
        tab.value(f"window.tried = {send % (method, path)}; 0")
        tab.wait_for(answered % "window.tried")
        said = tab.value("window.tried.querySelector('[role=status]').textContent")
        assert said.startswith("200"), (path, said, tab.value("window.tried.innerText"))
        assert tab.value("window.tried.querySelector('pre:last-of-type').textContent")
    body = next(
        command[command.index("-d") + 1]
        for command in commands
        if any(part.endswith("/v1/messages") for part in command)
    )
    assert it.it.post("/v1/messages", json.loads(body)).status_code == 200
    tab.value("document.getElementById('search').value = 'max_output_tokens'; search()")
    shown = tab.value(
        "[...document.querySelectorAll('#routes > details:not([hidden]) summary code')].map(it => it.textContent)"
    )
    assert "/v1/responses" in shown
    assert "/livez" not in shown
    assert tab.exceptions == []


def test_docs_asks_for_the_key_and_shows_every_route(tab: Tab, start: Start) -> None:
    it = start(keys=Keys(ApiKeys(["mine"])))
    open_page(tab, it)
    tab.open(it.url + "/docs", width=360)
    tab.wait_for("!document.getElementById('keys').hidden")
    tab.value("document.getElementById('key').focus()")
    tab.type("mine")
    tab.press(*ENTER)
    tab.wait_for("document.querySelectorAll('#routes > details').length > 0")

    shown = set(
        tab.value("[...document.querySelectorAll('#routes > details code:first-of-type')].map(it => it.innerText)")
    )
    assert shown == set(it.it.app.openapi()["paths"])
    for _ in range(3):  # routes, their answers and schemas, and what these name
        tab.value(OPEN_ALL)
        tab.value("new Promise(done => setTimeout(done, 300))")
    fields = tab.value("[...document.querySelectorAll('td:first-child code')].map(it => it.innerText)")
    assert {"temperature", "max_tokens", "tool_call_id", "finish_reason", "fallback_reasons"} <= set(fields)
    assert tab.value("document.documentElement.scrollWidth") <= 360
    assert tab.exceptions == []
