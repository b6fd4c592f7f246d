"""/v1/messages as Anthropic's own client sees it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest

from server.edge.keys import ApiKeys, Keys
from server.protocol.messages import FinishReason
from support.api.edge_fakes import MAX_MODEL_LEN, Served, delta, playing, saying, served, write_tokenizer
from support.api.running_api import Running

USER: Any = [{"role": "user", "content": "Hi"}]
VERSION = {"anthropic-version": "2023-06-01"}


@contextmanager
def client_of(it: Served, **options: Any) -> Iterator[anthropic.Anthropic]:
    with (
        Running(it, **options) as running,
        anthropic.Anthropic(base_url=running.url, api_key="right", max_retries=0, timeout=30) as client,
    ):
        yield client


def test_a_message_has_the_text_and_counts_of_its_stream(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    fields: Any = {"model": "tiny", "max_tokens": 16, "system": "Be brief.", "messages": USER}
    with client_of(it) as client:
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        num_tokens = client.messages.count_tokens(
            model="tiny", system=[{"type": "text", "text": "Be brief."}], messages=USER
        ).input_tokens
    prompt = b"[system]Be brief.[user]Hi[assistant]"
    assert [bytes(ids) for _, ids, _ in it.engine.submitted] == [prompt, prompt]
    assert num_tokens == len(prompt)
    for message in (whole, streamed):
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello"}]
        assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
        assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), 6)
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta", "text"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_tokens_beyond_the_context_are_counted(folder: Path) -> None:
    messages: Any = [{"role": "user", "content": "a" * 300 * MAX_MODEL_LEN}]
    with client_of(served(folder)) as client:
        assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > 300 * MAX_MODEL_LEN
        with pytest.raises(anthropic.BadRequestError, match="context"):
            client.messages.create(model="tiny", messages=messages, max_tokens=4)


def test_raw_events_are_named_by_type_and_begin_with_ping(folder: Path) -> None:
    answer = served(folder, saying("a")).post("/v1/messages", {"max_tokens": 4, "messages": USER, "stream": True})
    parts = [part.split("\n") for part in answer.text.split("\n\n") if part]
    for name, data in parts:
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    names = [name.removeprefix("event: ") for name, _ in parts]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence"),
    [
        (saying("ab", "cd"), {"stop_sequences": ["bc", "x"]}, "stop_sequence", "bc"),
        (saying("ab", finish=FinishReason.LENGTH), {}, "max_tokens", None),
        (playing(delta("", FinishReason.STOP)), {}, "end_turn", None),
    ],
)
def test_the_reason_to_stop_is_named(
    folder: Path, script: Any, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    body = served(folder, script).post("/v1/messages", {"max_tokens": 4, "messages": USER, **fields}).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert body["content"][0]["type"] == "text"


def test_the_context_may_hold_less_than_is_asked_for(folder: Path) -> None:
    it = served(folder, saying("ab", finish=FinishReason.LENGTH))
    prompt, reasons = len("[user]Hi[assistant]"), []
    with client_of(it) as client:
        for max_tokens in (64_000, MAX_MODEL_LEN - prompt + 1, MAX_MODEL_LEN - prompt):
            with client.messages.stream(model="tiny", max_tokens=max_tokens, messages=USER) as stream:
                reasons.append(stream.get_final_message().stop_reason)
    assert reasons == ["model_context_window_exceeded", "model_context_window_exceeded", "max_tokens"]
    assert {sampling.max_tokens for _, _, sampling in it.engine.submitted} == {MAX_MODEL_LEN - prompt}


TOOL: Any = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
QWEN = (  # as Qwen3's, in short
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    '{# "arguments" #}{% for m in messages %}[{{ m.role }}]'
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]{% if not enable_thinking %}<think></think>{% endif %}"
)


def test_thoughts_and_calls_of_tools_are_blocks_of_their_own(tmp_path: Path) -> None:
    it = served(tmp_path, saying("<think>Hm", "m.</think>", "Looking. ", CALL[:25], CALL[25:]), template=QWEN)
    fields: Any = {"model": "tiny", "max_tokens": 99, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    with client_of(it) as client:
        whole = client.messages.create(messages=USER, **fields)
        with client.messages.stream(messages=USER, **fields) as stream:
            streamed = stream.get_final_message()
        call = whole.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Snow", "is_error": True}
        turns: Any = [*USER, whole.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
        client.messages.create(messages=turns, **fields | {"thinking": {"type": "disabled"}})
    for message in (whole, streamed):
        thought, text, use = (block.to_dict() for block in message.content)
        assert (thought["thinking"], thought["signature"], text["text"]) == ("Hmm.", "", "Looking.")
        assert (use["name"], use["input"], message.stop_reason) == ("weather", {"city": "Bern"}, "tool_use")
    first, _, last = (bytes(ids).decode() for _, ids, _ in it.engine.submitted)
    assert first == "[weather][user]Hi[assistant]"
    calls = '<think>Hmm.</think>Looking.<tool_call>{"city": "Bern"}</tool_call>'
    assert last == f"[weather][user]Hi[assistant]{calls}[tool]Error: Snow[user]So?[assistant]<think></think>"


@pytest.mark.parametrize("display", ["omitted", "updates"])
def test_thinking_that_is_not_shown_comes_back(tmp_path: Path, display: str) -> None:
    """Claude Code asks so, and sends back what it has got."""
    it = served(tmp_path, saying("<think>Hm", "m.</think>", "Looking."), template=QWEN)
    fields: Any = {"model": "tiny", "max_tokens": 99, "thinking": {"type": "adaptive", "display": display}}
    with client_of(it) as client:
        whole = client.messages.create(messages=USER, **fields)
        with client.messages.stream(messages=USER, **fields) as stream:
            deltas = {event.delta.type for event in stream if event.type == "content_block_delta"}
            streamed = stream.get_final_message()
        assert deltas == {"signature_delta", "text_delta"}
        for message in (whole, streamed):
            assert [block.to_dict().get("thinking") for block in message.content] == ["", None]
            client.messages.create(messages=[*USER, message.to_param(), *USER], **fields)
    prompts = [bytes(ids).decode() for _, ids, _ in it.engine.submitted]
    assert prompts[2:] == ["[user]Hi[assistant]<think>Hmm.</think>Looking.[user]Hi[assistant]"] * 2


@pytest.mark.parametrize("signature", ["EqQB", "hallmark-thinking:?", "hallmark-thinking:/w=="])
def test_a_signature_of_another_server_holds_nothing(tmp_path: Path, signature: str) -> None:
    it = served(tmp_path, saying("Yes"), template=QWEN)
    thought = {"type": "thinking", "thinking": "", "signature": signature}
    turns = [*USER, {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}]}, *USER]
    assert it.post("/v1/messages", {"max_tokens": 4, "messages": turns}).status_code == 200
    (prompt,) = (bytes(ids).decode() for _, ids, _ in it.engine.submitted)
    assert prompt == "[user]Hi[assistant]Well.[user]Hi[assistant]<think></think>"


def test_a_last_turn_of_the_assistant_is_continued(folder: Path) -> None:
    it = served(folder)
    for messages in ([*USER, {"role": "assistant", "content": "Well: "}], USER):
        assert it.post("/v1/messages", {"max_tokens": 4, "messages": messages}).status_code == 200
    continued, opened = (bytes(ids).decode() for _, ids, _ in it.engine.submitted)
    assert (continued, opened) == ("[user]Hi[assistant]Well: ", "[user]Hi[assistant]")


RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "Snow"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [*content]}


@pytest.mark.parametrize(
    ("turns", "same"),
    [
        ([{"role": "user", "content": "a"}, turn("user", *blocks("b", "c"))], [turn("user", *blocks("a", "b", "c"))]),
        (
            [*USER, turn("assistant", THOUGHT, *blocks("a")), turn("assistant", THOUGHT, USE), turn("user", RESULT)],
            [*USER, turn("assistant", THOUGHT, THOUGHT, *blocks("a"), USE), turn("user", RESULT)],
        ),
        (
            [*USER, turn("assistant", USE), turn("user", RESULT), turn("user", *blocks("a"))],
            [*USER, turn("assistant", USE), turn("user", RESULT, *blocks("a"))],
        ),
        ([turn("user", *blocks("a")), turn("user"), turn("user", *blocks("b"))], [turn("user", *blocks("a", "b"))]),
        ([*USER, turn("assistant", *blocks("a")), turn("assistant", *blocks("b"))], None),  # the prefill is both
    ],
)
def test_consecutive_turns_of_one_role_are_one(tmp_path: Path, turns: Any, same: Any) -> None:
    write_tokenizer(
        tmp_path, template=QWEN.replace("[assistant]{% if", "{% if add_generation_prompt %}!{% endif %}{% if")
    )
    it = served(tmp_path)
    prompts = []
    for messages in (turns, same or [*USER, turn("assistant", *blocks("a", "b"))]):
        assert it.post("/v1/messages", {"max_tokens": 4, "messages": messages}).status_code == 200
        counted = it.post("/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"]
        prompts.append(bytes(it.engine.submitted[-1][1]).decode())
        assert counted == len(prompts[-1])
    assert prompts[0] == prompts[1]


def test_turns_of_the_system_stay_where_they_are(folder: Path) -> None:
    it = served(folder)
    system = {"role": "system", "content": "New rule."}
    messages = [*USER, system, system, *USER, *USER]
    assert it.post("/v1/messages", {"max_tokens": 4, "system": "Rule.", "messages": messages}).status_code == 200
    prompt = bytes(it.engine.submitted[0][1]).decode()
    assert prompt == "[system]Rule.[user]Hi[system]New rule.[system]New rule.[user]Hi\nHi[assistant]"


def test_text_and_results_of_a_turn_keep_their_order(tmp_path: Path) -> None:
    it = served(tmp_path, template=QWEN)
    messages = [*USER, turn("assistant", USE), turn("user", *blocks("a"), RESULT, *blocks("b", "c"))]
    assert it.post("/v1/messages", {"max_tokens": 4, "messages": messages}).status_code == 200
    assert b"[user]a[tool]Snow[user]b\nc[assistant]" in bytes(it.engine.submitted[0][1])


def test_a_forced_call_is_bound_by_a_grammar(tmp_path: Path) -> None:
    it = served(tmp_path, saying(CALL), template=QWEN)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto"}):
        body = {"max_tokens": 99, "messages": USER, "tools": [TOOL], "tool_choice": choice}
        assert it.post("/v1/messages", body).json()["content"][0]["name"] == "weather"
    assert [sampling.grammar is not None for _, _, sampling in it.engine.submitted] == [True, True, False]
    refused = it.post("/v1/messages", body | {"tool_choice": {"type": "tool", "name": "other"}}).json()
    assert refused["error"]["param"] == "tool_choice"


def test_a_schema_binds_the_answer(folder: Path) -> None:
    it = served(folder, saying('{"a": 1}'))
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with client_of(it) as client:
        config: Any = {"format": {"type": "json_schema", "schema": schema}}
        client.messages.create(model="tiny", max_tokens=99, messages=USER, output_config=config)
        config["format"]["schema"] = {"type": "no such type"}
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(model="tiny", max_tokens=99, messages=USER, output_config=config)
    assert caught.value.body["error"]["param"] == "output_config.format"  # type: ignore[index]
    assert it.engine.submitted[0][2].grammar is not None


def test_cached_tokens_are_not_input_tokens(folder: Path) -> None:
    first = delta("a", is_first=True)
    assert first.times is not None
    cached = msgspec.structs.replace(first, times=msgspec.structs.replace(first.times, num_cached_tokens=16))
    it = served(folder, playing(cached, delta("", FinishReason.STOP)))
    for stream in (False, True):
        answer = it.post("/v1/messages", {"max_tokens": 4, "messages": USER, "stream": stream})
        lines = [line for line in answer.text.split("\n") if "cache_read" in line]
        usage = json.loads(lines[-1].removeprefix("data: "))["usage"]
        assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (16, len("[user]Hi[assistant]") - 16)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"model": "other"}, "model", "'other' does not exist"),
        ({"messages": [{"role": "user", "content": "a" * 1024}]}, "messages", "1024"),
        ({"colour": 1}, "colour", "unknown"),
        ({"messages": [turn("user", {"type": "image", "source": {"type": "url", "url": "x"}})]},
            "messages[0].content[0].type", "'image' is not implemented"),
        ({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}, "system[0].type", "must be text"),
        *(({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": choice},
            "tools[0].type", "'web_search_20250305' is not implemented")
            for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"})),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "'bash_20250124' is not implemented"),
        ({"messages": [*USER, turn("assistant", USE)]}, "messages", "calls"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "at least 1"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "refuses"),
    ],
)  # fmt: skip
def test_refusals_come_in_anthropics_envelope_by_name(
    folder: Path, change: dict[str, Any], param: str, said: str
) -> None:
    error = anthropic.NotFoundError if param == "model" else anthropic.BadRequestError
    with client_of(served(folder)) as client, pytest.raises(error) as caught:
        client.messages.create(model="tiny", max_tokens=4, messages=USER, extra_body=change)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["param"].startswith(param)
    assert said in body["error"]["message"]
    assert caught.value.request_id == body["request_id"] == caught.value.response.headers["x-request-id"]


@pytest.mark.parametrize("asked", [{"json": {"hallmark": True}}, {"headers": {"x-hallmark": "1"}}])
def test_a_message_names_its_kernels_where_asked(folder: Path, asked: dict[str, Any]) -> None:
    it = served(folder)
    for stream in (False, True):
        body = {"max_tokens": 4, "messages": USER, "stream": stream} | asked.get("json", {})
        answer = it.post("/v1/messages", body, headers=asked.get("headers"))
        assert answer.headers["x-hallmark-plan"] == "abc123"
        last = json.loads(answer.text.strip().split("data: ")[-1])
        assert [use["path"] for use in last["hallmark"]["phases"]] == ["sdpa.math", "sdpa.cpu"]


def test_a_key_is_taken_from_either_header(folder: Path) -> None:
    keys = Keys(ApiKeys(["right"]))
    with client_of(served(folder), keys=keys) as client:
        assert client.messages.create(model="tiny", max_tokens=4, messages=USER).content
        bearer = client.with_options(api_key=None, auth_token="right")
        assert bearer.messages.create(model="tiny", max_tokens=4, messages=USER).content
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.with_options(api_key="wrong").messages.create(model="tiny", max_tokens=4, messages=USER)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_a_stream_that_fails_ends_with_an_error_event(folder: Path) -> None:
    it = served(folder, playing(delta("Hel"), delta("", FinishReason.ERROR)))
    with (
        client_of(it) as client,
        client.messages.stream(model="tiny", max_tokens=4, messages=USER) as stream,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        stream.until_done()
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_models_are_listed_in_anthropics_shape(folder: Path) -> None:
    it = served(folder, served_model_name="org/name")
    with client_of(it) as client:
        page = client.models.list(limit=1)
        (listed,) = [*page]
        assert (page.has_more, page.first_id, page.last_id) == (False, "org/name", "org/name")
        assert (listed.type, listed.id, listed.display_name, listed.lifecycle) == ("model", *["org/name"] * 2, "active")
        assert listed.created_at.timestamp() == it.services.program.started_at
        assert listed.max_input_tokens == MAX_MODEL_LEN
        assert client.models.retrieve("org/name") == listed
        assert next(iter(client.beta.models.list())).to_dict() == listed.to_dict()
        for nothing in (
            client.models.list(after_id="org/name"),
            client.models.list(before_id="org/name"),
            client.models.list(lifecycle=["deprecated", "retired"]),
        ):
            assert ([*nothing], nothing.first_id) == ([], None)
        assert [*client.models.list(lifecycle=["active"])] == [listed]
    assert it.get("/v1/models").json()["object"] == "list"  # OpenAI's, without the header


def test_a_model_is_listed_by_pages_of_its_names(folder: Path) -> None:
    names = ["a", "b", "c", "d", "e"]
    with client_of(served(folder, served_model_name=",".join(names))) as client:
        assert [it.id for it in client.models.list(limit=2)] == names  # the client asks for every page
        assert [it.id for it in client.models.list(limit=2, before_id="d").data] == ["b", "c"]
        assert [it.id for it in client.models.list(limit=2, before_id="d")] == ["b", "c", "a"]
        assert [it.id for it in client.models.list(after_id="b", before_id="e").data] == ["c", "d"]
        assert client.models.retrieve("c").id == "c"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"after_id": "other"}, "after_id"),
        ({"lifecycle[]": "new"}, "lifecycle[]"),
        ({"colour": "red"}, "colour"),
        ({"limit": [1, 2]}, "limit"),
    ],
)
def test_a_wrong_list_of_models_is_refused_by_name(folder: Path, query: dict[str, Any], param: str) -> None:
    answer = served(folder).get("/v1/models", headers=VERSION, params=query)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["param"]) == (400, "error", param)


def test_errors_beside_messages_are_in_anthropics_envelope(folder: Path) -> None:
    it = served(folder)
    with client_of(it) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("other")
        body: Any = caught.value.body
        assert (body["error"]["type"], body["error"]["code"]) == ("not_found_error", "model_not_found")
        assert caught.value.request_id == body["request_id"]
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.batches.list()
        assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert it.get("/v1/models/other").json()["error"]["type"] == "not_found_error"  # OpenAI's, without the header
    assert "type" not in it.get("/v1/completions", headers=VERSION).json()


HOSTED: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def test_tools_of_anthropics_servers_are_left_out_by_name(tmp_path: Path) -> None:
    it = served(tmp_path, saying("Yes"), template=QWEN)
    for stream in (False, True):
        asked = {"max_tokens": 4, "messages": USER, "tools": [HOSTED, TOOL], "stream": stream}
        assert '"left_out_tools":["web_search_20250305"]' in it.post("/v1/messages", asked).text
    assert {bytes(ids) for _, ids, _ in it.engine.submitted} == {b"[weather][user]Hi[assistant]<think></think>"}
    assert "left_out_tools" not in it.post("/v1/messages", asked | {"tools": [TOOL]}).text


def test_deferred_tools_are_told_once_they_are_found(tmp_path: Path) -> None:
    it = served(tmp_path, saying("Yes"), template=QWEN)
    tools = [TOOL | {"name": "search"}, *(TOOL | {"name": name, "defer_loading": True} for name in ("near", "far"))]
    asked = {"max_tokens": 4, "tools": tools}
    assert it.post("/v1/messages", {**asked, "messages": USER}).status_code == 200
    found = [{"type": "tool_reference", "tool_name": "far"}, *blocks("One tool.")]
    turns = [*USER, turn("assistant", USE), turn("user", RESULT | {"content": found})]
    assert it.post("/v1/messages", {**asked, "messages": turns}).status_code == 200
    named = {"tool_choice": {"type": "tool", "name": "near"}}
    assert it.post("/v1/messages", {**asked, "messages": USER, **named}).status_code == 200
    searched = [*tools, {"type": "tool_search_tool_regex", "name": "tool_search_tool_regex"}]
    assert it.post("/v1/messages", {**asked, "messages": USER, "tools": searched}).status_code == 200
    prompts = [bytes(ids).decode().partition("[user]") for _, ids, _ in it.engine.submitted]
    assert [head for head, _, _ in prompts] == ["[search]", "[search][far]", "[search][near]", "[search][near][far]"]
    assert "[tool]The tool far can be called now.\nOne tool.[assistant]" in prompts[1][2]


def use(number: int, thought: str = "") -> list[Any]:
    """A call of a tool, and its result."""
    called = {**USE, "id": f"c{number}", "input": {"n": number}}
    thoughts = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"Snow {number}, {'x' * 40}"}
    return [{"role": "assistant", "content": [*thoughts, called]}, {"role": "user", "content": [result]}]


def said(thought: str) -> dict[str, Any]:
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "Well."}]
    return {"role": "assistant", "content": blocks}


THINKING = "clear_thinking_20251015"
RESULTS = "clear_tool_uses_20250919"
# The first two thoughts are of one turn of the assistant: a result of a tool does not end it.
LONG: Any = [*USER, *use(1, "A"), *use(2, "B"), said("C"), *USER, said("D"), *USER, *use(3)]


def clearing(**options: Any) -> Any:
    """An edit of results of tools; an option `kind=n` is an object of that kind."""
    named = {
        "uses": ("trigger", "tool_uses"), "tokens": ("trigger", "input_tokens"),
        "keep": ("keep", "tool_uses"), "at_least": ("clear_at_least", "input_tokens"),
    }  # fmt: skip
    objects = {named[name][0]: {"type": named[name][1], "value": n} for name, n in options.items() if name in named}
    return {"type": RESULTS, **objects, **{name: it for name, it in options.items() if name not in named}}


@pytest.mark.parametrize(
    ("edit", "cleared", "gone"),
    [
        ({"type": THINKING, "keep": "all"}, None, []),
        ({"type": THINKING, "keep": {"type": "all"}}, None, []),
        ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}, None, []),
        ({"type": THINKING}, 1, ["<think>A", "<think>B", "<think>C"]),
        (clearing(), None, []),  # by default from 100,000 tokens on
        (clearing(uses=2, keep=1), 2, ["Snow 1", "Snow 2"]),
        (clearing(uses=3, keep=1), None, []),
        (clearing(uses=2, keep=1, at_least=9), 2, ["Snow 1", "Snow 2"]),
        (clearing(tokens=9), None, []),  # by default three are kept
        (clearing(tokens=9, keep=2, clear_tool_inputs=True), 1, ["Snow 1", '{"n": 1}']),
        (clearing(tokens=9, keep=2, clear_tool_inputs=["weather"]), 1, ["Snow 1", '{"n": 1}']),
        (clearing(tokens=9, keep=2, clear_tool_inputs=["other"]), 1, ["Snow 1"]),
        (clearing(uses=0, keep=0, exclude_tools=["weather"]), None, []),
        (clearing(uses=0, keep=0, at_least=10_000), None, []),
        ({"type": "compact_20260112", "instructions": "Short."}, None, []),
    ],
)
def test_edits_of_the_context_are_applied(
    tmp_path: Path, edit: dict[str, Any], cleared: int | None, gone: list[str]
) -> None:
    it = served(tmp_path, saying("Yes"), template=QWEN)
    fields: Any = {"model": "tiny", "messages": LONG, "tools": [TOOL]}
    asked: Any = {"context_management": {"edits": [edit]}, "betas": ["context-management-2025-06-27"]}
    with client_of(it) as client:
        plain = client.beta.messages.create(**fields, max_tokens=4)
        whole = client.beta.messages.create(**fields, **asked, max_tokens=4)
        with client.beta.messages.stream(**fields, **asked, max_tokens=4) as stream:
            streamed = stream.get_final_message()
        counted = client.beta.messages.count_tokens(**fields, **asked)
    assert plain.context_management is None
    before, after, again = (bytes(ids).decode() for _, ids, _ in it.engine.submitted)
    assert after == again
    for text in ("Snow 1", "Snow 2", "Snow 3", "<think>A", "<think>B", "<think>C", "<think>D", '{"n": 1}', '{"n": 3}'):
        assert (text in before, text in after) == (True, text not in gone)
    if not gone:
        assert after == before
    assert counted.context_management is not None
    assert (counted.context_management.original_input_tokens, counted.input_tokens) == (len(before), len(after))
    for message in (whole, streamed):
        assert message.context_management is not None
        applied = [it.to_dict() for it in message.context_management.applied_edits]
        what = "cleared_thinking_turns" if edit["type"] == THINKING else "cleared_tool_uses"
        counts = {"type": edit["type"], what: cleared, "cleared_input_tokens": len(before) - len(after)}
        assert applied == ([] if cleared is None else [counts])


def test_a_compaction_that_is_due_is_refused_by_name(folder: Path) -> None:
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 5}}
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        asked = {"max_tokens": 4} if route == "/v1/messages" else {}
        body = served(folder).post(route, {**asked, "messages": USER, "context_management": {"edits": [edit]}}).json()
        assert (body["error"]["code"], body["error"]["param"]) == (
            "unsupported_field",
            "context_management.edits[0].type",
        )


def test_cache_control_may_have_a_scope(folder: Path) -> None:
    control = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    system = [{"type": "text", "text": "Be brief.", "cache_control": control}]
    assert served(folder).post("/v1/messages", {"max_tokens": 4, "messages": USER, "system": system}).status_code == 200


def test_nothing_stands_behind_a_call_that_is_cut(tmp_path: Path) -> None:
    it = served(tmp_path, saying(*CALL[: CALL.index("Bern") + 2], finish=FinishReason.LENGTH), template=QWEN)
    with (
        client_of(it) as client,
        client.messages.stream(model="tiny", max_tokens=99, messages=USER, tools=[TOOL]) as stream,
    ):
        kinds = [event.content_block.type for event in stream if event.type == "content_block_start"]
    assert kinds == ["tool_use"]
