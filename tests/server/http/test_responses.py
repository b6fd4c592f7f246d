"""/v1/responses as OpenAI's own client sees it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from server.protocol.messages import FinishReason
from support.api.edge_fakes import (
    MAX_MODEL_LEN,
    Script,
    Served,
    delta,
    playing,
    saying,
    served,
    with_keys,
    write_tokenizer,
)
from support.api.running_api import Running

RESPONSES = "/v1/responses"


@contextmanager
def client_of(it: Served) -> Iterator[openai.OpenAI]:
    with (
        Running(it) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    parts = [part.split("\n") for part in text.split("\n\n") if part]
    found = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == ["event: " + event["type"] for event in found]
    return found


def test_a_response_has_the_text_and_counts_of_its_stream(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    with client_of(it) as client:
        whole = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
        message: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
        with client.responses.stream(model="tiny", input=message, instructions="Be brief.") as stream:
            seen = list(stream)
            streamed = stream.get_final_response()
    prompt = b"[system]Be brief.[user]Hi[assistant]"
    assert [bytes(ids) for _, ids, _ in it.engine.submitted] == [prompt, prompt]
    for response in (whole, streamed):
        assert (response.output_text, response.status, response.model) == ("Hello", "completed", "tiny")
        usage = response.usage
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(prompt), 6, len(prompt) + 6)
    assert [event.type for event in seen] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in seen] == list(range(10))


def test_a_cut_answer_is_incomplete(folder: Path) -> None:
    it = served(folder, saying("ab", finish=FinishReason.LENGTH))
    whole = it.post(RESPONSES, {"input": "Hi", "max_output_tokens": 2}).json()
    last = events_of(it.post(RESPONSES, {"input": "Hi", "max_output_tokens": 2, "stream": True}).text)[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"


def test_the_context_may_hold_less_than_is_asked_for(folder: Path) -> None:
    it = served(folder, saying("ab", finish=FinishReason.LENGTH))
    answer = it.post(RESPONSES, {"input": "Hi", "max_output_tokens": 64_000}).json()
    assert (answer["status"], answer["max_output_tokens"]) == ("incomplete", 64_000)
    assert it.engine.submitted[0][2].max_tokens == MAX_MODEL_LEN - len("[user]Hi[assistant]")
    chat = it.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64_000})
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "max_tokens")  # as OpenAI and vLLM do


@pytest.mark.parametrize("script", [saying(""), playing(delta("", FinishReason.STOP))])
def test_an_answer_that_ends_at_once_is_an_empty_message(folder: Path, script: Script) -> None:
    it = served(folder, script)
    whole = it.post(RESPONSES, {"input": "Hi"}).json()
    last = events_of(it.post(RESPONSES, {"input": "Hi", "stream": True}).text)[-1]["response"]
    for response in (whole, last):
        (item,) = response["output"]
        assert (item["type"], item["status"], item["content"][0]["text"]) == ("message", "completed", "")


def test_a_response_continues_one_that_is_stored(folder: Path) -> None:
    it = served(folder, saying("Yes"))
    with client_of(it) as client:
        first = client.responses.create(model="tiny", input="One", instructions="Only now.")
        with client.responses.stream(model="tiny", input="Two", previous_response_id=first.id) as stream:
            second = stream.get_final_response()
        third = client.responses.create(model="tiny", input="Three", previous_response_id=second.id)
        assert client.responses.retrieve(first.id).output_text == "Yes"
        assert client.responses.retrieve(third.id).previous_response_id == second.id
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError, match=second.id):
            client.responses.retrieve(second.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="tiny", input="Four", previous_response_id=second.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")
        unstored = client.responses.create(model="tiny", input="Hi", store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored.id)
    prompts = [bytes(ids) for _, ids, _ in it.engine.submitted]
    history = b"[user]One[assistant]Yes[user]Two[assistant]Yes[user]Three[assistant]"
    assert prompts[:3] == [
        b"[system]Only now.[user]One[assistant]",
        history[: len(b"[user]One[assistant]Yes[user]Two[assistant]")],
        history,
    ]


def test_reasoning_and_calls_are_items_of_their_own(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    write_tokenizer(
        tmp_path,
        template='{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{# "arguments" #}'
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}"
        "</tool_call>{% endfor %}{% endfor %}[assistant]{{ reasoning_effort }}",
    )
    it = served(tmp_path, saying("<think>Hm", "m.</think>", "Looking. ", call[:25], call[25:]))
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}]
    fields: Any = {"model": "tiny", "tools": tools, "reasoning": {"effort": "low"}}
    with client_of(it) as client:
        whole = client.responses.create(input="Hi", **fields)
        with client.responses.stream(input="Hi", **fields) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        use = whole.output[-1]
        assert use.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": use.call_id, "output": "Snow"}
        client.responses.create(input=[output], previous_response_id=whole.id, **fields)
    for response in (whole, streamed):
        thought, text, use = (item.to_dict() for item in response.output)
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
        assert (text["content"][0]["text"], response.output_text) == ("Looking.", "Looking.")
        assert (use["name"], json.loads(use["arguments"])) == ("weather", {"city": "Bern"})
    assert [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    last = bytes(it.engine.submitted[-1][1]).decode()
    said = '<think>Hmm.</think>Looking.<tool_call>{"city": "Bern"}</tool_call>'
    assert last == f"[weather][user]Hi[assistant]{said}[tool]Snow[assistant]low"


def test_a_schema_binds_the_text(folder: Path) -> None:
    it = served(folder, saying('{"a": 1}'))
    form: Any = {
        "type": "json_schema",
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    with client_of(it) as client:
        response = client.responses.create(model="tiny", input="Hi", text={"format": form})
        assert response.text is not None
        assert response.text.format is not None
        assert (response.text.format.type, json.loads(response.output_text)) == ("json_schema", {"a": 1})
        bad: Any = {"format": form | {"schema": {"type": "no such type"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input="Hi", text=bad)
    assert caught.value.param == "text.format"
    assert it.engine.submitted[0][2].grammar is not None


def test_a_stored_response_is_seen_by_its_key_alone(folder: Path) -> None:
    it = with_keys(served(folder), "one", "two")
    one, two = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("one", "two"))
    name = it.post(RESPONSES, {"input": "Hi"}, **one).json()["id"]
    path = f"{RESPONSES}/{name}"
    assert [it.get(path, **who).status_code for who in (one, two)] == [200, 404]
    assert it.request("DELETE", path, **two).status_code == 404
    assert it.post(RESPONSES, {"input": "Hi", "previous_response_id": name}, **two).status_code == 404
    assert it.request("DELETE", path, **one).json() == {"id": name, "object": "response", "deleted": True}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools]}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type", "'local_shell' is not implemented"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tools[0].type",
            "'web_search' is not implemented, and tool_choice asks",
        ),
        ({"tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp' is not implemented"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": allowed("required", {"type": "web_search"})},
            "tool_choice.tools[0].type",
            "'web_search' is not implemented, and tool_choice asks",
        ),
        ({"tool_choice": allowed("auto", {"type": "mcp", "server_label": "a"})}, "tool_choice.tools[0]", "'mcp'"),
        (
            {"tool_choice": allowed("auto", {"type": "function", "name": "f"})},
            "tool_choice.tools[0]",
            "names no function",
        ),
        ({"tool_choice": allowed("auto")}, "tool_choice.tools", "at least 1"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": ["array", "null"]}}]},
            "tools[0].parameters",
            "a JSON schema whose type is object",
        ),
        ({"tool_choice": allowed("none", {"type": "mcp"})}, "tool_choice.mode", "auto or required"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference' is not implemented"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "'input_image' is not implemented",
        ),
        ({"background": True}, "background", "all it may be is false"),
        ({"input": "refuse me"}, "input", "refuses"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "a" * 1024}, "input", "1024"),
        ({"input": []}, "input", "at least 1"),
        ({"stream_options": {}}, "stream_options", "stream"),
    ],
)
def test_refusals_name_the_clients_own_field(folder: Path, fields: dict[str, Any], param: str, said: str) -> None:
    answer = served(folder).post(RESPONSES, {"input": "Hi"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_a_stream_that_fails_says_so_in_its_own_events(folder: Path) -> None:
    it = served(folder, playing(delta("Hel"), delta("", FinishReason.ERROR)))
    answer = it.post(RESPONSES, {"input": "Hi", "stream": True})
    *_, error, failed = events_of(answer.text)
    assert (error["type"], error["code"]) == ("error", "internal_error")
    assert failed["sequence_number"] == error["sequence_number"] + 1
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert it.get(f"{RESPONSES}/{failed['response']['id']}").status_code == 404


CONVERSATION: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "One"}], "id": "msg_mine"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "id": None},
    {"role": "assistant", "content": "Looking."},
    {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "Noon", "id": "msg_mine"},  # an id that is taken
]


def test_input_items_are_listed_in_pages(folder: Path) -> None:
    it = served(folder, saying("Yes"))
    with client_of(it) as client:
        first = client.responses.create(model="tiny", input=CONVERSATION)
        second = client.responses.create(model="tiny", input="Two", previous_response_id=first.id)
        forth = [*client.responses.input_items.list(first.id, order="asc")]
        assert [*client.responses.input_items.list(first.id)] == forth[::-1]
        page = client.responses.input_items.list(first.id, order="asc", limit=4)
        assert (page.has_more, page.data) == (True, forth[:4])
        assert [*page] == forth  # the client asks for the next page by itself
        behind = client.responses.input_items.list(first.id, after=forth[2].id, limit=2)
        assert (behind.has_more, behind.data) == (False, forth[1::-1])
        continued = [*client.responses.input_items.list(second.id, order="asc", limit=3)]
    assert len({item.id for item in forth}) == len(forth) == len(CONVERSATION)
    assert [item.to_dict() for item in forth] == [
        {"id": forth[0].id, "type": "message", "status": "completed", "role": "system",
         "content": [{"type": "input_text", "text": "Be brief."}]},
        {"id": "msg_mine", "type": "message", "status": "completed", "role": "user",
         "content": [{"type": "input_text", "text": "One"}]},
        {"id": forth[2].id, "type": "reasoning", "status": "completed", "content": [],
         "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"id": forth[3].id, "type": "message", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}]},
        {"id": forth[4].id, "type": "function_call", "status": "completed", "call_id": "c1", "name": "clock",
         "arguments": "{}"},
        {"id": forth[5].id, "type": "function_call_output", "status": "completed", "call_id": "c1", "output": "Noon"},
    ]  # fmt: skip
    assert continued[:6] == forth
    said, asked = continued[6:]
    assert said.to_dict() == first.output[0].to_dict()
    assert asked.to_dict()["content"] == [{"type": "input_text", "text": "Two"}]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
        ({"include[]": "message.output_text.logprobs"}, "include[]"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_page_of_items_is_refused_by_name(folder: Path, query: dict[str, str], param: str) -> None:
    it = served(folder)
    path = f"{RESPONSES}/{it.post(RESPONSES, {'input': 'Hi'}).json()['id']}/input_items"
    assert it.get(path).status_code == 200
    answer = it.get(path, params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_each_call_about_a_stored_response_is_answered(folder: Path) -> None:
    with client_of(served(folder, saying("Yes"))) as client:
        found = client.responses.create(model="tiny", input="Hi")
        assert client.responses.retrieve(found.id, include=["reasoning.encrypted_content"]).output_text == "Yes"
        for refused, said in (
            (lambda: client.responses.cancel(found.id), "background"),
            (lambda: client.responses.retrieve(found.id, stream=True), "cannot be streamed"),
            (lambda: client.responses.retrieve(found.id, include=["message.output_text.logprobs"]), "include"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                refused()
        for unknown in (
            lambda: client.responses.cancel("resp_none"),
            lambda: client.responses.input_items.list("resp_none"),
            lambda: client.responses.delete("resp_none"),
        ):
            with pytest.raises(openai.NotFoundError, match="resp_none"):
                unknown()
        with pytest.raises(openai.NotFoundError, match="compact' is not implemented"):
            client.responses.compact(model="tiny", input="Hi")
        with pytest.raises(openai.NotFoundError, match="input_tokens' is not implemented"):
            client.responses.input_tokens.count(model="tiny", input="Hi")


def test_reasoning_belongs_to_the_message_behind_it(tmp_path: Path) -> None:
    write_tokenizer(
        tmp_path,
        template='{# tools "arguments" <tool_call> #}{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}'
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "({{ c.function.name }}){% endfor %}{% endfor %}[assistant]",
    )
    it = served(tmp_path)
    say: Any = {"role": "assistant", "type": "message"}

    def reason(text: str) -> Any:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "Noon"}
    items = [
        {"role": "user", "content": "Hi"},
        *(reason("A"), say | {"content": "one"}),
        *(reason("B"), say | {"content": "two"}, call, result),
        *(reason("C"), call | {"call_id": "c2"}, reason("D"), call | {"call_id": "c3"}, result | {"call_id": "c2"}),
        say | {"content": "three"},
    ]
    assert it.post(RESPONSES, {"input": items}).status_code == 200
    assert bytes(it.engine.submitted[0][1]).decode() == (
        "[user]Hi[assistant]<think>A</think>one[assistant]<think>B</think>two(clock)[tool]Noon"
        "[assistant]<think>C\nD</think>(clock)(clock)[tool]Noon[assistant]three[assistant]"
    )


def as_codex_sends(**more: Any) -> dict[str, Any]:
    """A request in the form of Codex's: fields and tools of it that are no functions of a chat."""
    command = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    agent: dict[str, Any] = {"type": "function", "name": "spawn", "strict": False, "parameters": command}
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "exec", "strict": False, "parameters": command, "description": "Runs."},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Of agents.",
            "tools": [agent, agent | {"name": "wait"}],
        },
        {"type": "web_search", "external_web_access": False},
    ]
    asked = {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": False, "store": False}
    beside = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
    return {"model": "tiny", "instructions": "Be brief.", "input": "Hi", **asked, **beside, **more}


TOLD = (
    "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]{% endfor %}"
    '{# "arguments" <tool_call> #}{% for m in messages %}[{{ m.role }}]{{ m.content }}'
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}[assistant]"
)


def calling(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_of_every_form_are_told_as_functions(tmp_path: Path) -> None:
    it = served(tmp_path, saying("Yes"), template=TOLD)
    answer = it.post(RESPONSES, as_codex_sends(client_metadata={"x-codex": "1"})).json()
    prompt = bytes(it.engine.submitted[0][1]).decode()
    assert prompt == (
        "[exec: Runs.][apply_patch: Patches.\n\nThe input matches this lark grammar:\n"
        'start: "*** Begin Patch"][agents__spawn: Of agents.][agents__wait: ][system]Be brief.[user]Hi[assistant]'
    )
    assert [tool["type"] for tool in answer["tools"]] == ["function", "custom", "namespace"]
    assert answer["metadata"] == {"left_out_tools": "web_search"}


def test_a_call_in_a_namespace_has_its_two_names(tmp_path: Path) -> None:
    it = served(tmp_path, saying(calling("agents__spawn", {"cmd": "ls"})), template=TOLD)
    with client_of(it) as client:
        with client.responses.stream(**as_codex_sends(store=True)) as stream:
            added: Any = next(event for event in stream if event.type == "response.output_item.added")
            response = stream.get_final_response()
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.namespace, call.name, json.loads(call.arguments)) == ("agents", "spawn", {"cmd": "ls"})
        assert added.item.to_dict()["namespace"] == "agents"
        results: list[Any] = [
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "Yes"},
        ]
        client.responses.create(**as_codex_sends(input=results))
        client.responses.create(**as_codex_sends(input=results[1:], previous_response_id=response.id))
    for _, ids, _ in it.engine.submitted[1:]:
        assert '<agents__spawn {"cmd": "ls"}>[tool]Yes[assistant]' in bytes(ids).decode()


def test_a_custom_tool_gets_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=TOLD)
    patch = '*** Begin Patch\n"x"\n'
    made = calling("apply_patch", {"input": patch})
    it = served(tmp_path, saying(made[:40], made[40:]))
    with client_of(it) as client:
        with client.responses.stream(**as_codex_sends(store=True)) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        (call,) = response.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("apply_patch", patch)
        result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done"}
        more = as_codex_sends(input=[result], previous_response_id=response.id, store=True)
        listed = client.responses.input_items.list(client.responses.create(**more).id).data
    assert kinds[2:-1] == [
        "response.output_item.added", "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done", "response.output_item.done",
    ]  # fmt: skip
    assert f"<apply_patch {json.dumps({'input': patch})}>[tool]Done" in bytes(it.engine.submitted[-1][1]).decode()
    assert [item.type for item in listed] == ["custom_tool_call_output", "custom_tool_call", "message"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"in', ""),
        ('{\n"input" : ', ""),
        ('{"input": "', ""),
        ('{"input": "a \\"b\\" \\', 'a "b" '),
        (r'{"input": "\u00e9\ud83d\ude00\u00', "é😀"),
        (r'{"input": "\u00e9\ud83d\ude0', "é"),
        ('{"input": "a", "b": 1', '{"input": "a", "b": 1'),
        ('{"input": "a" ', "a"),
        ('{"input": 5', '{"input": 5'),
    ],
)
def test_a_custom_call_that_is_cut_has_the_text_so_far(tmp_path: Path, written: str, text: str) -> None:
    write_tokenizer(tmp_path, template=TOLD)
    made = f'<tool_call>\n{{"name": "exec", "arguments": {written}'
    it = served(tmp_path, saying(made, finish=FinishReason.LENGTH))
    asked = {"input": "Hi", "tools": [{"type": "custom", "name": "exec"}], "tool_choice": "required"}
    (call,) = it.post(RESPONSES, asked).json()["output"]
    assert (call["type"], call["status"], call["input"]) == ("custom_tool_call", "incomplete", text)


SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}


def test_a_search_for_tools_is_the_clients_to_make(tmp_path: Path) -> None:
    it = served(tmp_path, saying(calling("tool_search", {"query": "ping"})), template=TOLD)
    fields: Any = {"model": "tiny", "tools": [SEARCH]}
    found = {"type": "namespace", "name": "probe", "description": "Of a probe.", "tools": [
        {"type": "function", "name": "ping", "defer_loading": True, "parameters": {"type": "object"}},
    ]}  # fmt: skip
    with client_of(it) as client:
        with client.responses.stream(input="Hi", **fields) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        (call,) = response.output
        assert call.type == "tool_search_call"
        assert (call.execution, call.arguments, call.status) == ("client", {"query": "ping"}, "completed")
        output: Any = {"type": "tool_search_output", "call_id": call.call_id, "execution": "client", "tools": [found]}
        second = client.responses.create(input=[output], previous_response_id=response.id, **fields)
        listed = client.responses.input_items.list(second.id).data
        again: Any = {**output, "tools": [found | {"description": "Of another probe."}]}  # the newer one counts
        client.responses.create(input=[{"role": "user", "content": "Hi"}, output, again], **fields)
    assert kinds[2:-1] == ["response.output_item.added", "response.output_item.done"]
    assert [item.type for item in listed] == ["tool_search_output", "tool_search_call", "message"]
    prompts = [bytes(ids).decode() for _, ids, _ in it.engine.submitted]
    assert prompts[0].startswith("[tool_search: Finds.][user]")
    assert prompts[1] == (
        '[tool_search: Finds.][probe__ping: Of a probe.][user]Hi[assistant]<tool_search {"query": "ping"}>'
        '[tool]{"found_tools":["probe__ping"]}[assistant]'
    )
    assert "[probe__ping: Of another probe.]" in prompts[2]


def test_a_search_that_is_no_json_is_given_as_it_is(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=TOLD)
    made = '<tool_call>\n{"name": "tool_search", "arguments": {"query": "pi'
    it = served(tmp_path, saying(made, finish=FinishReason.LENGTH))
    asked = {"input": "Hi", "tools": [SEARCH], "tool_choice": "required"}
    (call,) = it.post(RESPONSES, asked).json()["output"]
    assert (call["type"], call["arguments"]) == ("tool_search_call", {"malformed_arguments": '{"query": "pi'})


def test_tools_within_the_input_are_told_too(tmp_path: Path) -> None:
    it = served(tmp_path, saying(calling("functions__exec", {"input": "ls"})), template=TOLD)
    more = [
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
        {"type": "web_search"},
    ]
    items = [{"type": "additional_tools", "role": "developer", "tools": more}, {"role": "user", "content": "Hi"}]
    answer = it.post(RESPONSES, {"input": items}).json()
    assert bytes(it.engine.submitted[0][1]).decode() == "[functions__exec: ][user]Hi[assistant]"
    (call,) = answer["output"]
    assert (call["type"], call["namespace"], call["name"], call["input"]) == (
        "custom_tool_call", "functions", "exec", "ls",
    )  # fmt: skip
    assert answer["metadata"] == {"left_out_tools": "web_search"}
    listed = it.get(f"{RESPONSES}/{answer['id']}/input_items").json()["data"]
    assert listed[-1]["tools"] == more
    follow = {"input": "And?", "previous_response_id": answer["id"]}
    assert it.post(RESPONSES, follow).status_code == 200
    assert bytes(it.engine.submitted[1][1]).startswith(b"[functions__exec: ][user]Hi")


def test_a_tool_is_chosen_by_the_name_the_client_gave(tmp_path: Path) -> None:
    it = served(tmp_path, saying(calling("agents__wait", {})), template=TOLD)
    for kind, name, status in (
        ("function", "wait", 200),
        ("function", "agents__wait", 200),
        ("custom", "apply_patch", 200),
        ("custom", "wait", 400),
        ("function", "none", 400),
    ):
        asked = as_codex_sends(tool_choice={"type": kind, "name": name})
        assert it.post(RESPONSES, asked).status_code == status
    twice = as_codex_sends()["tools"][2]
    answer = it.post(RESPONSES, as_codex_sends(tools=[twice, {"type": "function", "name": "agents__wait"}]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[1]")


@pytest.mark.parametrize(
    ("mode", "tools", "seen"),
    [
        ("auto", [{"type": "function", "name": "wait"}, {"type": "web_search"}], "[agents__wait: ][system]"),
        (
            "required",
            [{"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "exec"}],
            "[exec: Runs.][apply_patch: Patches.\n\n",
        ),
        ("auto", [{"type": "web_search"}], "[system]Be brief."),
    ],
)
def test_allowed_tools_of_every_form_are_all_that_is_seen(
    tmp_path: Path, mode: str, tools: list[dict[str, Any]], seen: str
) -> None:
    it = served(tmp_path, saying(calling("agents__wait", {})), template=TOLD)
    with client_of(it) as client:
        answer = client.responses.create(**as_codex_sends(tool_choice=allowed(mode, *tools)))
    assert answer.to_dict()["tool_choice"] == allowed(mode, *tools)
    prompt, grammar = bytes(it.engine.submitted[0][1]).decode(), it.engine.submitted[0][2].grammar
    assert prompt.startswith(seen)
    assert (grammar is not None) is (mode == "required")


def test_a_long_name_in_a_namespace_stays_one_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=TOLD)
    space, tools = "n" * 100, [{"type": "function", "name": "f" * 100 + end} for end in "ab"]
    it = served(tmp_path, saying("Yes"))
    asked = {"tools": [{"type": "namespace", "name": space, "description": "", "tools": tools}], "input": "Hi"}
    assert it.post(RESPONSES, asked).status_code == 200
    names = [part.partition(":")[0] for part in bytes(it.engine.submitted[0][1]).decode().split("[")[1:3]]
    assert [len(name) for name in names] == [128, 128]
    assert names[0] != names[1]
    it = served(tmp_path, saying(calling(names[1], {})))
    (call,) = it.post(RESPONSES, asked).json()["output"]
    assert (call["namespace"], call["name"]) == (space, "f" * 100 + "b")


WRITE = {"type": "function", "name": "write", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
BROKEN = '<tool_call>\n{"name": "write", "arguments": {"a": "x'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("written", "choice", "statuses"),
    [
        (BROKEN, "auto", ["incomplete"]),
        (BROKEN, "required", ["incomplete"]),
        (f'{BROKEN}"}}}}\n</tool_call>', "required", ["completed"]),
        (f'{BROKEN}"}}}}', "auto", ["completed"]),
        (f'Hm. {BROKEN}"}}}}\n</tool_call>', "auto", ["completed", "completed"]),
    ],
)
def test_a_call_that_is_cut_is_incomplete_and_the_last(
    tmp_path: Path, written: str, choice: str, statuses: list[str], stream: bool
) -> None:
    write_tokenizer(tmp_path, template='{# <tool_call> "arguments" #}{{ tools }}{{ messages[0].content }}')
    it = served(tmp_path, saying(*written, finish=FinishReason.LENGTH))
    fields = {"input": "Hi", "tools": [WRITE], "tool_choice": choice, "stream": stream}
    answer = it.post(RESPONSES, fields)
    response = events_of(answer.text)[-1]["response"] if stream else answer.json()
    assert response["status"] == "incomplete"
    if not stream and choice == "auto" and statuses == ["incomplete"]:  # what is no call is the text
        assert [item["type"] for item in response["output"]] == ["message"]
    else:
        assert [item["status"] for item in response["output"]] == statuses
        assert response["output"][-1]["type"] == "function_call"
