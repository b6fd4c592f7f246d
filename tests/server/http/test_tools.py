"""Tools and reasoning of a chat: what the model is told, and its calls and thoughts told apart from its answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from server.errors import SettingsError
from server.http.openai.schemas import ChatChunk, ChatCompletion
from server.protocol.messages import FinishReason, TokenDelta
from server.settings import Settings
from server.text.answer.syntax import choose_syntax
from server.text.chat_template import ChatTemplate
from support.api.edge_fakes import END, Script, Served, delta, events, playing, saying, served
from support.api.running_api import Running

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
# As Qwen3's, in short.
QWEN = (
    "{% for tool in tools or [] %}[tool]{{ tool | tojson }}{% endfor %}"
    '{# "arguments" #}{% for m in messages %}[{{ m.role }}]'
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{{ c.id }}</tool_call>{% endfor %}{{ m.tool_call_id }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort }}"
)


def serving(
    folder: Path, script: Script, *, template: str = QWEN, special: Sequence[str] = (), **settings: object
) -> Served:
    return served(folder, script, template=template, special=special, **settings)


def prompt_of(it: Served) -> str:
    return bytes(token_id for token_id in it.engine.submitted[-1][1] if token_id < END).decode()


def message_of(it: Served, **fields: object) -> Any:
    answer = it.post(CHAT, {"messages": USER, "tools": [WEATHER], **fields})
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content)
    return answer.json()["choices"][0]["message"]


def test_a_call_is_answered_as_one(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("Look", "ing. ", CALL))
    choice = it.post(CHAT, {"messages": USER, "tools": [WEATHER]}).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Looking."
    assert (call["type"], call["id"][:5]) == ("function", "call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert prompt_of(it).startswith(f"[tool]{json.dumps(WEATHER)}[user]Weather?")


@pytest.mark.parametrize(
    ("ids", "read"),
    [
        (["b", "a"], ["a", "b"]),
        (["b", "c", "a"], ["a", "b", "c"]),
        (["c", "a"], ["a", "c"]),
        (["b", "other", "a"], ["b", "other", "a"]),
        (["b", "a", "b"], ["b", "a", "b"]),
    ],
)
def test_results_are_read_in_the_order_of_their_calls(tmp_path: Path, ids: list[str], read: list[str]) -> None:
    it = serving(tmp_path, saying("Fine."), template=QWEN.replace("{{ m.tool_call_id }}", ""))
    calls = [{"id": id_, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for id_ in "abc"]
    results = [{"role": "tool", "tool_call_id": id_, "content": f"of {id_}"} for id_ in ids]
    message_of(it, messages=[*USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results, *USER])
    assert "".join(f"[tool]of {id_}" for id_ in read) + "[user]" in prompt_of(it)


def test_a_call_streams_as_openais_do(tmp_path: Path) -> None:
    it = serving(tmp_path, saying(*CALL))
    body = {"messages": USER, "tools": [WEATHER], "stream": True}
    *chunks, done = events(it.post(CHAT, body))
    assert done == "[DONE]"
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    calls = [call for it in deltas for call in it.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert (calls[0]["type"], calls[0]["function"]) == ("function", {"name": "weather", "arguments": ""})
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Bern"}'
    assert len(calls) > 10
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"  # type: ignore[index]


def test_tools_without_a_place_in_the_template_become_text(folder: Path) -> None:
    it = served(folder, saying(CALL))
    assert message_of(it)["tool_calls"][0]["function"]["name"] == "weather"
    assert prompt_of(it).startswith("[system]# Tools\n\nYou may call")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in prompt_of(it)
    history = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [called("weather", '{"city":"Bern"}')]},
        {"role": "tool", "tool_call_id": "id1", "content": "Rain"},
        {"role": "tool", "tool_call_id": "id2", "content": "Snow"},
    ]
    assert it.post(CHAT, {"messages": history}).status_code == 200
    assert prompt_of(it) == (
        f"[system]Be brief.[user]Weather?[assistant]{CALL}[user]<tool_response>\nRain\n</tool_response>\n"
        "<tool_response>\nSnow\n</tool_response>[assistant]"
    )


@pytest.mark.parametrize("flag", [{"tool_call_parser": "qwen3_coder"}, {"reasoning_parser": "openai_gptoss"}])
def test_a_format_that_the_model_cannot_know_stops_the_start(folder: Path, flag: dict[str, str]) -> None:
    settings = msgspec.convert({"model": "tiny", **flag}, Settings)
    with pytest.raises(SettingsError, match="hermes"):
        choose_syntax(ChatTemplate.load(folder), settings.tool_call_parser, settings.reasoning_parser)


def test_without_a_system_role_the_user_describes_the_tools(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    it = serving(tmp_path, saying(CALL), template=template)
    assert message_of(it)["tool_calls"]
    assert prompt_of(it).startswith("[user]# Tools")
    assert prompt_of(it).endswith("\n\nWeather?")


def called(name: str, arguments: str, call_id: str = "id1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "index": 0, "function": {"name": name, "arguments": arguments}}


def test_the_calls_of_a_conversation_reach_the_template(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("Rain."))
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [called("weather", '{"city": "Bern"}')], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "id1", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "assistant", "tool_calls": [called("weather", "no json")]},
    ]
    assert it.post(CHAT, {"messages": messages}).status_code == 200
    assert prompt_of(it) == (
        '[user]Weather?[assistant]<think>Hm.</think><tool_call>weather {"city": "Bern"}id1</tool_call>'
        '[tool]Rainid1[assistant]<tool_call>weather "no json"id1</tool_call>[assistant]'
    )


def test_no_text_about_tools_can_spell_a_special_token(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("ok"))
    spelled = "<|end|>"
    tool = {"type": "function", "function": {"name": "f", "description": spelled, "parameters": {spelled: spelled}}}
    call = called(spelled, json.dumps({spelled: [spelled]}), spelled)
    body = {
        "messages": [
            {"role": "assistant", "tool_calls": [call], "reasoning_content": spelled},
            {"role": "tool", "tool_call_id": spelled, "content": spelled},
        ],
        "tools": [tool],
        "chat_template_kwargs": {"reasoning_effort": spelled},
    }
    assert it.post(CHAT, body).status_code == 200
    assert prompt_of(it).count(spelled) == 11
    assert END not in it.engine.submitted[-1][1]


def test_with_no_choice_the_prompt_has_no_tools(tmp_path: Path) -> None:
    it = serving(tmp_path, saying(CALL))
    assert message_of(it, tool_choice="none")["content"] == CALL
    assert "[tool]" not in prompt_of(it)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_bound_by_a_grammar(tmp_path: Path, choice: object) -> None:
    it = serving(tmp_path, saying(CALL))
    assert message_of(it, tool_choice=choice)["tool_calls"][0]["function"]["name"] == "weather"
    grammar = it.engine.submitted[-1][2].grammar
    assert grammar is not None
    assert "<tool_call>" in grammar.text
    assert message_of(it, tool_choice="auto")["tool_calls"]
    assert it.engine.submitted[-1][2].grammar is None


TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TIME_CALL = CALL.replace("weather", "time")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("written", "reason", "calls"),
    [
        (TIME_CALL, "stop", []),
        (CALL, "tool_calls", ["weather"]),
        (TIME_CALL + CALL + TIME_CALL + CALL, "tool_calls", ["weather", "weather"]),
    ],
)
def test_allowed_tools_are_all_that_is_seen_and_called(
    tmp_path: Path, written: str, reason: str, calls: list[str]
) -> None:
    it = serving(tmp_path, saying("Well. ", *written))
    fields: Any = {"model": "tiny", "messages": USER, "tools": [TIME, WEATHER]}
    fields["tool_choice"] = allowed("auto", "weather")
    with (
        Running(it) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, (choice.message.content or "").strip()) == (reason, "Well.")
        assert [call.function.name for call in choice.message.tool_calls or []] == calls
    assert prompt_of(it).startswith(f"[tool]{json.dumps(WEATHER)}[user]")
    assert it.engine.submitted[-1][2].grammar is None


def test_one_of_the_allowed_tools_can_be_required(tmp_path: Path) -> None:
    it = serving(tmp_path, saying(CALL))
    message_of(it, tools=[TIME, WEATHER], tool_choice=allowed("required", "weather"))
    grammar = it.engine.submitted[-1][2].grammar
    assert grammar is not None
    assert "weather" in grammar.text
    assert "time" not in grammar.text


def test_a_reasoning_model_thinks_before_a_forced_call(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>Hm.</think>\n\n", CALL))
    message = message_of(it, tool_choice="required")
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    grammar = it.engine.submitted[-1][2].grammar
    assert grammar is not None
    assert grammar.before is not None
    message_of(it, tool_choice="required", chat_template_kwargs={"enable_thinking": False})
    assert it.engine.submitted[-1][2].grammar.before is None


def test_a_bound_answer_stands_behind_its_reasoning(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>Hm.</think>\n\n", "yes"))
    answer = it.post(CHAT, {"messages": USER, "structured_outputs": {"choice": ["yes", "no"]}}).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "yes")


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [
        ("<think>I sho", "uld go.", "\n\nyes"),
        ("<think>", "uld go.", "\n\nyes"),
        ("<think>Hm.</think>", None, "uld go.</think>\n\nyes"),
        ("I sho", None, "uld go.</think>\n\nyes"),
    ],
)
def test_an_answer_goes_on_with_reasoning(tmp_path: Path, said: str, reasoning: str | None, content: str) -> None:
    it = serving(tmp_path, saying("uld ", "go.", "</think>\n\nyes"))
    body: dict[str, Any] = {"messages": [*USER, {"role": "assistant", "content": said}], "continue_final_message": True}
    message = it.post(CHAT, body).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    it.post(CHAT, body | {"response_format": {"type": "json_object"}})
    grammar = it.engine.submitted[-1][2].grammar
    assert grammar is not None
    assert (grammar.before is not None) is (reasoning is not None)


@pytest.mark.parametrize(
    ("written", "reason"), [(CALL, "tool_calls"), (CALL[: CALL.index("Bern") + 2] + "STOP", "stop")]
)
def test_a_call_that_a_stop_string_cuts_is_no_call_to_make(tmp_path: Path, written: str, reason: str) -> None:
    it = serving(tmp_path, saying(*written))
    *chunks, _ = events(it.post(CHAT, {"messages": USER, "tools": [WEATHER], "stream": True, "stop": "STOP"}))
    choices: list[Any] = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]
    assert choices[-1]["finish_reason"] == reason
    assert any("tool_calls" in choice["delta"] for choice in choices)


@pytest.mark.parametrize(("choice", "content"), [("required", None), ("auto", None), ("none", "")])
def test_a_stream_that_may_be_a_call_opens_no_text(tmp_path: Path, choice: str, content: str | None) -> None:
    it = serving(tmp_path, saying(CALL))
    *chunks, _ = events(it.post(CHAT, {"messages": USER, "tools": [WEATHER], "stream": True, "tool_choice": choice}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert deltas[0] == {"role": "assistant", "content": content}
    assert ("".join(it.get("content") or "" for it in deltas) == "") == (choice != "none")


def test_a_finished_call_is_kept_where_a_second_is_cut(tmp_path: Path) -> None:
    it = serving(tmp_path, saying(CALL, "\n", CALL[:40], finish=FinishReason.LENGTH))
    choice = it.post(CHAT, {"messages": USER, "tools": [WEATHER], "tool_choice": "required"}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Bern"}']


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": allowed("auto", "weather")}, "tool_choice.allowed_tools.tools[0]"),
        (
            {"tool_choice": allowed("auto", "weather", "f"), "tools": [WEATHER]},
            "tool_choice.allowed_tools.tools[1]",
        ),
        ({"tool_choice": allowed("auto"), "tools": [WEATHER]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("any", "weather"), "tools": [WEATHER]}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [WEATHER]}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "weather"}}, "tools": [WEATHER]}, "tool_choice.type"),
        ({"tools": [WEATHER, {**WEATHER, "function": {"name": "weather"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"\udc00": 1}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "reasoning": "x"}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"documents": [{"text": "a"}]}, "documents"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path, fields: dict[str, object], param: str) -> None:
    body = json.dumps({"messages": USER, **fields})
    headers = {"content-type": "application/json"}
    answer = serving(tmp_path, saying("x")).request("POST", CHAT, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_one_call_at_a_time_where_a_request_wants_it(tmp_path: Path) -> None:
    it = serving(tmp_path, saying(CALL, CALL))
    assert len(message_of(it)["tool_calls"]) == 2
    assert len(message_of(it, parallel_tool_calls=False)["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("written", "calls", "choice"),
    [
        ("<tool", [], "required"),
        (CALL[: CALL.index("weather") + 3], [], {"type": "function", "function": {"name": "weather"}}),
        (CALL[: CALL.index("arguments")], [("weather", "")], "required"),
        (CALL[: CALL.index("Bern") + 2], [("weather", '{"city": "Be')], "required"),
    ],
)
def test_a_forced_call_that_is_cut_leaves_no_content(
    tmp_path: Path, written: str, calls: list[tuple[str, str]], choice: object
) -> None:
    fields: Any = {"model": "tiny", "messages": USER, "tools": [WEATHER], "tool_choice": choice}
    script = saying("<think>Hm.</think>\n", *written, finish=FinishReason.LENGTH)
    with (
        Running(serving(tmp_path, script)) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.create(stream=True, **fields) as stream:
            chunks = [chunk.choices[0] for chunk in stream]
    given = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert (whole.finish_reason, whole.message.content or "", given) == ("length", "", calls)
    assert whole.message.reasoning_content == "Hm."
    assert chunks[-1].finish_reason == "length"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    deltas = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.name for call in deltas if call.name] == [name for name, _ in calls]
    assert "".join(call.arguments or "" for call in deltas) == "".join(arguments for _, arguments in calls)


def test_reasoning_comes_apart_and_is_counted(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>", "Hm, ", "rain", "</think>", "Rain."))
    answer = it.post(CHAT, {"messages": USER}).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm, rain", "Hm, rain", "Rain.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm, rain</think")}
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = events(it.post(CHAT, body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert "".join(it.get("reasoning_content", "") for it in deltas) == "Hm, rain"
    assert "".join(it.get("content", "") for it in deltas) == "Rain."
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0  # type: ignore[index]
    hidden = it.post(CHAT, {"messages": USER, "include_reasoning": False}).json()
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["usage"] == answer["usage"]


def test_options_reach_the_template(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>ok"))
    closed = it.post(CHAT, {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}})
    assert closed.json()["choices"][0]["message"]["reasoning"] == "ok"
    assert prompt_of(it).endswith("[assistant]<think></think>")
    it.post(CHAT, {"messages": USER, "reasoning_effort": "low"})
    assert prompt_of(it).endswith("[assistant]low")
    it.post(CHAT, {"messages": USER, "reasoning_effort": "none"})
    assert prompt_of(it).endswith("<think></think>none")


def test_each_answer_is_parsed_by_itself(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>a</think>", CALL))
    choices = it.post(CHAT, {"messages": USER, "tools": [WEATHER], "n": 2}).json()["choices"]
    assert [choice["message"]["reasoning"] for choice in choices] == ["a", "a"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_special_tokens_that_mark_channels_reach_the_parser(tmp_path: Path) -> None:
    special = ["<|channel|>", "<|message|>", "<|start|>", "<|call|>"]
    ids = {text: END + 1 + i for i, text in enumerate(special)} | {"<|end|>": END}
    template = "{# <|channel|> <|message|> #}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    written: list[str] = [
        "<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant", "<|channel|>",
    ]  # fmt: skip
    written += ["commentary to=functions.weather", "<|message|>", '{"city": "Bern"}']
    tokens = [token_id for text in written for token_id in ([ids[text]] if text in ids else text.encode())]
    script = playing(*(TokenDelta("", [token_id], None) for token_id in tokens), delta("", FinishReason.STOP))
    it = serving(tmp_path, script, template=template, special=special)
    message = message_of(it)
    assert (message["reasoning"], message["content"]) == ("hm", None)
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}


def test_text_held_back_for_a_stop_string_is_counted_once(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>", "ab", finish=FinishReason.LENGTH))
    body = {"messages": USER, "stop": "bc"}
    answer = it.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["reasoning"] == "ab"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_stop_strings_end_a_parsed_answer(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("<think>a</think>", "one two"))
    choice = it.post(CHAT, {"messages": USER, "stop": " two"}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")


def test_a_chat_with_tools_is_tokenized_as_it_is_answered(tmp_path: Path) -> None:
    it = serving(tmp_path, saying("ok"))
    tokens = it.post("/tokenize", {"messages": USER, "tools": [WEATHER]}).json()["tokens"]
    message_of(it)
    assert tokens == it.engine.submitted[-1][1]
