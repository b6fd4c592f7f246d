"""Bodies that mean harm, or are merely wrong: each costs its own request and nothing else."""

import json
from pathlib import Path

import pytest

from server.errors import InvalidJson
from server.http.common.json_body import parse_json
from support.api.edge_fakes import served

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}

HOSTILE: list[tuple[str, bytes, int, str]] = [
    ("empty", b"", 400, "invalid_json"),
    ("not json", b"{", 400, "invalid_json"),
    ("null", b"null", 400, "invalid_json"),
    ("array", b"[]", 400, "invalid_json"),
    ("string", b'"x"', 400, "invalid_json"),
    ("not utf-8", b'{"prompt": "\xff"}', 400, "invalid_json"),
    ("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', 400, "invalid_json"),
    ("deep array", b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400, "invalid_json"),
    ("deep object", b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "invalid_json"),
    ("object that only the parser can walk", b'{"a":' * 600 + b"1" + b"}" * 600, 400, "invalid_json"),
    ("too many arrays", b'{"prompt": [' + b"[1]," * 50_000 + b"[1]]}", 400, "invalid_json"),
    (
        "too many fields",
        b'{"prompt": "a"' + b"".join(b',"k%d":null' % i for i in range(50_000)) + b"}",
        400,
        "invalid_json",
    ),
    ("endless string of quotes", b'{"prompt": "' + b'[\\"' * 200_000, 400, "invalid_json"),
    ("just too deep", b'{"user":' + b"[" * 40 + b"]" * 40 + b"}", 400, "invalid_json"),
    ("nan", b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json"),
    ("infinity", b'{"prompt": "a", "temperature": -Infinity}', 400, "invalid_json"),
    ("too large a float", b'{"prompt": "a", "temperature": 1e999}', 400, "invalid_json"),
    ("huge integer", b'{"prompt": "a", "max_tokens": ' + b"9" * 6000 + b"}", 400, "invalid_json"),
    ("large integer", b'{"prompt": "a", "max_tokens": ' + b"9" * 400 + b"}", 400, "invalid_value"),
    ("large token id", b'{"prompt": [1, ' + b"9" * 400 + b"]}", 400, "invalid_value"),
    ("duplicate key", b'{"prompt": "a", "prompt": "b"}', 400, "invalid_json"),
    ("lone surrogate", b'{"prompt": "\\ud800"}', 400, "invalid_value"),
    ("lone surrogate as a model", b'{"prompt": "a", "model": "\\ud800"}', 404, "model_not_found"),
    ("lone surrogate as a key", b'{"prompt": "a", "\\ud800": 1}', 400, "unknown_field"),
    ("lone surrogate as a stop", b'{"prompt": "a", "stop": "\\udfff"}', 400, "invalid_value"),
    ("lone surrogate among prompts", b'{"prompt": ["a", "\\ud800"]}', 400, "invalid_value"),
    ("lone surrogate among token ids", b'{"prompt": [1, "\\ud800"]}', 400, "invalid_value"),
    ("lone surrogate as a number", b'{"prompt": "a", "temperature": "\\ud800"}', 400, "invalid_value"),
    ("lone surrogate as a boolean", b'{"prompt": "a", "stream": "\\ud800"}', 400, "invalid_value"),
    ("lone surrogate as a stop id", b'{"prompt": "a", "stop_token_ids": ["\\ud800"]}', 400, "invalid_value"),
    ("no prompt", b"{}", 400, "invalid_value"),
    ("empty prompt", b'{"prompt": ""}', 400, "invalid_value"),
    ("empty list", b'{"prompt": []}', 400, "invalid_value"),
    ("empty inner list", b'{"prompt": [[]]}', 400, "invalid_value"),
    ("number as prompt", b'{"prompt": 5}', 400, "invalid_value"),
    ("mixed prompt", b'{"prompt": [1, "a", null]}', 400, "invalid_value"),
    ("boolean token id", b'{"prompt": [true]}', 400, "invalid_value"),
    ("negative token id", b'{"prompt": [-1]}', 400, "invalid_value"),
    ("token id beyond the vocabulary", b'{"prompt": [257]}', 400, "invalid_value"),
    ("too many prompts", b'{"prompt": [' + b'"a",' * 64 + b'"a"]}', 400, "invalid_value"),
    ("wrong model", b'{"prompt": "a", "model": "gpt"}', 404, "model_not_found"),
    ("min above max", b'{"prompt": "a", "max_tokens": 3, "min_tokens": 4}', 400, "invalid_value"),
    ("stop id beyond the vocabulary", b'{"prompt": "a", "stop_token_ids": [999]}', 400, "invalid_value"),
    ("too many answers in all", b'{"prompt": ["a", "b"], "n": 33}', 400, "invalid_value"),
    ("several candidates", b'{"prompt": "a", "best_of": 2}', 400, "unsupported_field"),
    ("bias of no id", b'{"prompt": "a", "logit_bias": {"05": 1}}', 400, "invalid_value"),
    ("bias beyond the vocabulary", b'{"prompt": "a", "logit_bias": {"257": 1}}', 400, "invalid_value"),
    ("bias as a list", b'{"prompt": "a", "logit_bias": [1]}', 400, "invalid_value"),
    ("prompt's logprobs in a stream", b'{"prompt": "a", "prompt_logprobs": 1, "stream": true}', 400, "invalid_value"),
    ("likeliest tokens", b'{"prompt": "a", "top_logprobs": 1}', 400, "unsupported_field"),
    ("unknown field", b'{"prompt": "a", "temprature": 1}', 400, "unknown_field"),
    ("messages in a completion", b'{"prompt": "a", "messages": []}', 400, "unknown_field"),
    ("options without stream", b'{"prompt": "a", "stream_options": {"include_usage": true}}', 400, "invalid_value"),
    ("unknown option", b'{"prompt": "a", "stream": true, "stream_options": {"x": 1}}', 400, "unknown_field"),
    ("too long", b'{"prompt": "' + b"a" * 1024 + b'"}', 400, "context_length_exceeded"),
    ("far too long", b'{"prompt": "' + b"a" * 1_000_000 + b'"}', 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("body", "status", "code"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_body_costs_only_its_own_request(folder: Path, body: bytes, status: int, code: str) -> None:
    it = served(folder)
    answer = it.request("POST", COMPLETIONS, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code", "request_id", "trace_id"}
    assert it.engine.submitted == []
    assert it.services.admission.num_requests == 0


CHATS: list[tuple[str, object, str]] = [
    ("no messages", [], "invalid_value"),
    ("messages as text", "hello", "invalid_value"),
    ("message as text", ["hello"], "invalid_value"),
    ("no role", [{"content": "a"}], "invalid_value"),
    ("nobody's role", [{"role": "nobody", "content": "a"}], "invalid_value"),
    ("no content", [{"role": "user"}], "invalid_value"),
    ("null as content", [{"role": "system", "content": None}], "invalid_value"),
    ("number as content", [{"role": "user", "content": 5}], "invalid_value"),
    ("image", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "unsupported_field"),
    ("part without text", [{"role": "user", "content": [{"type": "text"}]}], "invalid_value"),
    ("tool calls", [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}], "invalid_value"),
    ("unknown field", [{"role": "user", "content": "a", "mood": "good"}], "unknown_field"),
    ("refused by the template", [{"role": "user", "content": "refuse me"}], "invalid_messages"),
]


@pytest.mark.parametrize(("messages", "code"), [case[1:] for case in CHATS], ids=[case[0] for case in CHATS])
def test_hostile_messages_are_refused(folder: Path, messages: object, code: str) -> None:
    answer = served(folder).post("/v1/chat/completions", {"messages": messages})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


REFUSALS = [
    ({"max_tokens": 0.5}, "max_tokens", "max_tokens must be an integer, got 0.5."),
    ({"n": True}, "n", "n must be an integer, got true."),
    ({"n": 65}, "n", "n must be an integer of at most 64, got 65."),
    ({"seed": 2**63}, "seed", "seed must be an integer of at most 9223372036854775807, got 9223372036854775808."),
    ({"repetition_penalty": 1e-38}, "repetition_penalty",
        "repetition_penalty must be a number of at least 0.01, got 1e-38."),
    ({"top_p": -0.5}, "top_p", "top_p must be a number of at least 0, got -0.5."),
    ({"min_p": -(10**400)}, "min_p", None),
    ({"min_p": "secret"}, "min_p", "min_p must be a number, got a string of length 6."),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]",
        "stop_token_ids[1] must be an integer, got a string of length 1."),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids",
        "stop_token_ids must be an array of at most 128 items, got an array of"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "The field 'stream_options.usage' is unknown."),
    ({"stream_options": {" - at `$.b": 1}}, "stream_options. - at `$.b", "The field 'stream_options. - at `$.b' is"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", None),
    ({"user": "a" * 513}, "user", "user must be a string of at most 512 characters, got a string of length 513."),
    ({"stream_options": 5}, "stream_options", "stream_options must be an object, got 5."),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "The field 'messages[0].role' is missing."),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role",
        "messages[0].role must be assistant or developer or system or tool or user, got a string of length 6."),
    ({"messages": []}, "messages", "messages must be an array of at least 1 items, got an array of length 0."),
    ({"messages": None}, "messages", "The field 'messages' is missing."),
    ({"messages": [{"role": "user", "content": "a" * 1024}]}, "messages", "This model's maximum context length is "),
    ({"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages", "This model's context holds "),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSALS)
def test_every_refusal_names_its_field_and_quotes_no_text(
    folder: Path, fields: dict[str, object], param: str, message: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    error = served(folder).post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message or "")


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        (["a", 5], "prompt[1]", "prompt must be a string, token ids or a list of either, got 5 at prompt[1]."),
        ([[1], [1.5]], "prompt[1]", "prompt[1] must be a list of token ids, got an array of length 1."),
    ],
)
def test_of_several_prompts_the_wrong_one_is_named(folder: Path, prompt: object, param: str, message: str) -> None:
    error = served(folder).post(COMPLETIONS, {"prompt": prompt}).json()["error"]
    assert (error["param"], error["message"]) == (param, message)


def test_brackets_and_colons_in_a_text_are_no_arrays_and_fields() -> None:
    text = '[{":' * 30_000 + "\\"
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[1],"prompt":[2]}',
        b'{"prompt":[1],"stream_options":{"a":1,"a":2}}',
        b'{"prompt":[{"a":1,"a":2}]}',
        b'{"prompt":"a:b","n":1,"n":1}',
        b'{"prompt":"a","x":{"y":{"z":1,"z":1}},"messages":[{"role":"b"}]}',
    ],
)
def test_a_key_that_is_there_twice_is_refused_wherever_it_is(body: bytes) -> None:
    with pytest.raises(InvalidJson, match="twice in one object"):
        parse_json(body)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [1, 2, 128255, 2**63, -1, 2**70], "n": 1.5e-7, "seed": -0.0, "stream_options": {"a": {"b": []}}},
        {"prompt": 'a:b \u0000 \U0001f600 "', "messages": [{"role": "c", "content": [{"type": "d"}]}], "e": None},
        {"a": {"b": {"c": {}}}, "d": [[], [[1]]], "e": True, "f": ""},
    ],
)
def test_json_means_what_it_means_to_everybody(value: object) -> None:
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()) == value
