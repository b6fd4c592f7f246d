"""Send a demo server random bodies on every POST route, and write down what came back.

python trials/fuzz_posts.py --cases 100000 --out docs/benchmarks/fuzz-posts.json

A body is one that a client may send, made of fields drawn from pools, valid beside valid as often as not; then up to
three of its values, anywhere in it, may be replaced by hostile ones, dropped or doubled. Streams are read to the end.
The status is 1 for an answer of 5xx, an answer that is not JSON or an event stream, a stream without an end, a metric
that blames the model's numbers for a request's limits, and an engine that is another process at the end. Fields that
draw alone are found by schemathesis (schema_cases.py), 20 times as slow; this one finds what fields do to each other.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
from running_server import ROOT, free_port, running

Body = dict[str, Any]
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"n": {"type": "number", "minimum": 0, "maximum": 0.5}}},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3},
    {"const": 9007199254740993},
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "boolean"}]},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}},
    {},
    True,
    {"type": "string", "pattern": "^[a-c]{2}$", "format": "date"},
)
TEXTS = (
    "Hi",
    "",
    " ",
    "Once upon a time",
    "\u96ea\U0001f600e\u0301",
    "<|im_end|>",
    "<think>",
    "a\x00b",
    "\ufeff",
    "{" * 40,
)
HOSTILE = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, -0.0, 1e308, 1e-320, "", "x", "\x00",
    "\U0001f600" * 50, "a" * 3000, [], {}, [[]], [None], {"a": None}, ["x"] * 100, [1] * 100, {"type": "text"},
    {"type": "function"}, {"type": "object"}, "auto", "none", "required", "json", "text", "default", float(2**53),
)  # fmt: skip


def text(rng: random.Random) -> str:
    return rng.choice(TEXTS) if rng.random() < 0.7 else " ".join(rng.choices(TEXTS, k=rng.randint(1, 6)))


def token_ids(rng: random.Random) -> list[int]:
    return rng.choices(range(4096), k=rng.randint(1, 6))


def schema(rng: random.Random) -> Any:
    return rng.choice(SCHEMAS)


def function(rng: random.Random) -> Body:
    found: Body = {"name": rng.choice(["f", "get_weather", "ping"])}
    if rng.random() < 0.8:
        found["parameters"] = schema(rng)
    if rng.random() < 0.3:
        found |= {"description": text(rng), "strict": rng.random() < 0.5}
    return found


def call(rng: random.Random) -> Body:
    arguments = rng.choice(['{"a": 1}', "{}", "", "nonsense", "[1]"])
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def message(rng: random.Random) -> Body:
    role = rng.choice(["user", "user", "user", "assistant", "system", "developer", "tool"])
    content: Any = text(rng) if rng.random() < 0.7 else [{"type": "text", "text": text(rng)}]
    found: Body = {"role": role, "content": content}
    if role == "tool":
        found["tool_call_id"] = "call_1"
    if role == "assistant" and rng.random() < 0.4:
        found |= {"tool_calls": [call(rng)], "content": rng.choice([None, "", content])}
    return found


def messages(rng: random.Random) -> list[Body]:
    return [message(rng) for _ in range(rng.randint(1, 4))]


Draw = Callable[[random.Random], Any]
SAMPLING: dict[str, Draw] = {
    "temperature": lambda rng: rng.choice([0, 0.7, 1, 2]),
    "top_p": lambda rng: rng.choice([0, 0.1, 0.9, 1]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 5, 5000]),
    "min_p": lambda rng: rng.choice([0, 0.5, 1]),
    "seed": lambda rng: rng.choice([0, -5, 2**62]),
    "stop": lambda rng: rng.choice([text(rng), [text(rng), "b"]]),
    "stop_token_ids": token_ids,
    "min_tokens": lambda rng: rng.randint(0, 3),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "logit_bias": lambda rng: {str(it): rng.choice([-100, 100, 0.5]) for it in token_ids(rng)},
    "allowed_token_ids": token_ids,
    "bad_words": lambda rng: [rng.choice(["the", "a", " ", "Hi"])],
    "presence_penalty": lambda rng: rng.choice([-2, 0, 2]),
    "frequency_penalty": lambda rng: rng.choice([-2, 0, 2]),
    "repetition_penalty": lambda rng: rng.choice([0.5, 1, 2]),
    "n": lambda rng: rng.randint(1, 3),
    "response_format": lambda rng: rng.choice(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(rng)}},
        ]
    ),
    "structured_outputs": lambda rng: rng.choice(
        [
            {"regex": rng.choice(["[ab]{2}", "a*", "(", "\\d+"])},
            {"choice": ["the", "a"]},
            {"json": schema(rng)},
            {"json_object": True},
            {"grammar": rng.choice(['root ::= "a" | "b"', "root ::=", 'root ::= root "a"'])},
        ]
    ),
    "guided_choice": lambda _: ["yes", "no"],
    "prompt_logprobs": lambda rng: rng.choice([0, 1, 20]),
    "include_stop_str_in_output": lambda rng: rng.random() < 0.5,
    "skip_special_tokens": lambda rng: rng.random() < 0.5,
    "truncate_prompt_tokens": lambda rng: rng.choice([-1, 1, 3]),
    "return_token_ids": lambda _: True,
    "return_tokens_as_token_ids": lambda _: True,
    "cache_salt": text,
    "priority": lambda rng: rng.choice([-1, 0, 5]),
    "hallmark": lambda _: True,
    "stream": lambda _: True,
    "stream_options": lambda _: {"include_usage": True},
}
COMPLETION: dict[str, Draw] = SAMPLING | {
    "echo": lambda _: True,
    "logprobs": lambda rng: rng.choice([0, 1, 5]),
    "max_tokens": lambda rng: rng.randint(0, 4),
    "add_special_tokens": lambda rng: rng.random() < 0.5,
    "suffix": lambda _: None,
}
CHAT: dict[str, Draw] = SAMPLING | {
    "tools": lambda rng: [{"type": "function", "function": function(rng)} for _ in range(rng.randint(1, 3))],
    "tool_choice": lambda rng: rng.choice(
        ["auto", "none", "required", {"type": "function", "function": {"name": rng.choice(["f", "ping"])}}]
    ),
    "parallel_tool_calls": lambda rng: rng.random() < 0.5,
    "logprobs": lambda _: True,
    "top_logprobs": lambda rng: rng.randint(0, 20),
    "max_completion_tokens": lambda rng: rng.randint(1, 4),
    "continue_final_message": lambda rng: rng.random() < 0.5,
    "add_generation_prompt": lambda rng: rng.random() < 0.5,
    "include_reasoning": lambda rng: rng.random() < 0.5,
    "reasoning_effort": lambda rng: rng.choice(["low", "none", "high"]),
    "chat_template_kwargs": lambda rng: {"enable_thinking": rng.random() < 0.5},
}
RESPONSES: dict[str, Draw] = {
    "instructions": text,
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "tools": lambda rng: (
        [{"type": "function", **function(rng)} for _ in range(rng.randint(1, 3))]
        + rng.choice([[], [{"type": "web_search"}], [{"type": "namespace", "name": "m", "tools": []}]])
    ),
    "tool_choice": lambda rng: rng.choice(["auto", "none", "required", {"type": "function", "name": "f"}]),
    "text": lambda rng: {
        "format": rng.choice(
            [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "s", "schema": schema(rng)}]
        )
    },
    "store": lambda rng: rng.random() < 0.5,
    "stream": lambda _: True,
    "reasoning": lambda rng: rng.choice([{"effort": "low"}, {"summary": "auto"}, None]),
    "client_metadata": lambda _: {"a": "b"},
    "include": lambda _: ["reasoning.encrypted_content"],
    "parallel_tool_calls": lambda rng: rng.random() < 0.5,
    "truncation": lambda rng: rng.choice(["auto", "disabled"]),
    "previous_response_id": lambda _: "resp_none",
    "metadata": lambda _: {"k": "v"},
}
MESSAGES: dict[str, Draw] = {
    "system": lambda rng: rng.choice([text(rng), [{"type": "text", "text": text(rng)}]]),
    "temperature": lambda rng: rng.choice([0, 0.5, 1]),
    "top_p": SAMPLING["top_p"],
    "top_k": lambda rng: rng.choice([1, 5]),
    "stop_sequences": lambda rng: [text(rng)],
    "stream": lambda _: True,
    "tools": lambda rng: [
        {"name": rng.choice(["f", "ping"]), "input_schema": {"type": "object", "properties": {"a": schema(rng)}}}
        for _ in range(rng.randint(1, 3))
    ],
    "tool_choice": lambda rng: rng.choice([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}]),
    "thinking": lambda rng: rng.choice([{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}]),
    "context_management": lambda rng: {"edits": rng.choice([[], [{"type": "clear_thinking_20251015", "keep": "all"}]])},
    "metadata": lambda _: {"user_id": "u"},
}


def anthropic_message(rng: random.Random) -> Body:
    role = rng.choice(["user", "user", "assistant", "system"])
    blocks: list[Body] = [{"type": "text", "text": text(rng)}]
    if role == "assistant" and rng.random() < 0.4:
        blocks.append({"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}})
    if role == "user" and rng.random() < 0.4:
        blocks.insert(0, {"type": "tool_result", "tool_use_id": "t1", "content": text(rng)})
    return {"role": role, "content": rng.choice([text(rng), blocks])}


def response_item(rng: random.Random) -> Body:
    kind = rng.random()
    if kind < 0.6:
        role = rng.choice(["user", "assistant", "system", "developer"])
        part = {"type": "output_text" if role == "assistant" else "input_text", "text": text(rng)}
        return {"type": "message", "role": role, "content": rng.choice([text(rng), [part]])}
    if kind < 0.75:
        return {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    if kind < 0.9:
        return {"type": "function_call_output", "call_id": "c", "output": text(rng)}
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text(rng)}]}


def _prompt(rng: random.Random) -> Any:
    return rng.choice([text(rng), token_ids(rng), [text(rng), text(rng)], [token_ids(rng), token_ids(rng)]])


def _some(rng: random.Random, fields: dict[str, Draw]) -> Body:
    return {name: fields[name](rng) for name in rng.sample(sorted(fields), k=min(len(fields), rng.randint(0, 5)))}


ROUTES: dict[str, tuple[int, Draw]] = {  # weight, and what makes a body that may be right
    "/v1/completions": (25, lambda rng: {"prompt": _prompt(rng), "max_tokens": 3} | _some(rng, COMPLETION)),
    "/v1/chat/completions": (25, lambda rng: {"messages": messages(rng), "max_tokens": 3} | _some(rng, CHAT)),
    "/v1/responses": (
        20,
        lambda rng: (
            {
                "input": rng.choice([text(rng), [response_item(rng) for _ in range(rng.randint(1, 4))]]),
                "max_output_tokens": 3,
            }
            | _some(rng, RESPONSES)
        ),
    ),
    "/v1/messages": (
        20,
        lambda rng: (
            {
                "model": "demo",
                "max_tokens": 3,
                "messages": [anthropic_message(rng) for _ in range(rng.randint(1, 4))],
            }
            | _some(rng, MESSAGES)
        ),
    ),
    "/v1/messages/count_tokens": (
        4,
        lambda rng: (
            {"model": "demo", "messages": [anthropic_message(rng) for _ in range(rng.randint(1, 4))]}
            | _some(rng, {name: draw for name, draw in MESSAGES.items() if name in ("system", "tools", "tool_choice")})
        ),
    ),
    "/tokenize": (
        3,
        lambda rng: (
            rng.choice([{"prompt": text(rng)}, {"messages": messages(rng)}])
            | rng.choice([{}, {"add_special_tokens": False}, {"return_token_strs": True}])
        ),
    ),
    "/detokenize": (1, lambda rng: {"tokens": token_ids(rng)}),
    "/v1/embeddings": (1, lambda rng: {"input": _prompt(rng)}),  # of another task: refused by name
    "/v1/responses/resp_none/cancel": (1, lambda _: {}),
    "/attention/quarantine": (
        1,
        lambda rng: {"path": rng.choice(["none.such", "sdpa"]), "shape": rng.choice(["a", ""])},
    ),
    "/no/such/route": (1, lambda rng: {"prompt": text(rng)}),
}
EMBED_ROUTES: dict[str, tuple[int, Draw]] = {
    "/v1/embeddings": (
        1,
        lambda rng: (
            {"input": _prompt(rng)}
            | rng.choice([{}, {"encoding_format": "base64"}, {"dimensions": rng.choice([1, 256])}, {"user": text(rng)}])
        ),
    )
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a body below its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [(*path, key), *places(inner, (*path, key))]
    return found


def hurt(rng: random.Random, body: Any) -> Any:
    """Return the body with one value replaced, dropped or doubled."""
    body = json.loads(json.dumps(body))  # pools are shared
    all_places = places(body)
    if not all_places or rng.random() < 0.02:
        return rng.choice(HOSTILE)
    *path, last = rng.choice(all_places)
    parent = body
    for key in path:
        parent = parent[key]
    kind = rng.random()
    if kind < 0.6:
        parent[last] = rng.choice(HOSTILE)
    elif kind < 0.75:
        del parent[last]
    elif kind < 0.9 and isinstance(parent, dict):
        parent[rng.choice(["extra", "type", str(last) + "s", "\x00"])] = parent[last]
    elif isinstance(parent, list):
        parent += [parent[last]] * rng.choice([1, 40])
    return body


def request(rng: random.Random, routes: dict[str, tuple[int, Draw]]) -> tuple[str, bytes]:
    """Draw a route and the bytes of a body."""
    path = rng.choices([*routes], [weight for weight, _ in routes.values()])[0]
    body = routes[path][1](rng)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        body = hurt(rng, body)
    content = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()
    return path, content[: rng.randint(0, len(content))] if rng.random() < 0.01 else content


async def send(client: httpx2.AsyncClient, path: str, body: bytes) -> tuple[str, str | None]:
    """Send one; return its status, and what is wrong with the answer."""
    try:
        answer = await client.post(path, content=body)
    except httpx2.HTTPError as error:
        return "none", f"{type(error).__name__}: {error}"
    status = str(answer.status_code)
    if answer.status_code >= 500:
        return status, answer.text[:300]
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        last = answer.text.rstrip().rpartition("\n\n")[2]
        if '"error"' in last and ("internal" in last or "nonfinite" in last):
            return status, last[:300]
        ended = (
            last == "data: [DONE]" or '"type":"message_stop"' in last or '"type":"response.' in last or "error" in last
        )
        return status, None if ended else f"the stream ends with {last[:200]!r}"
    try:
        answer.json()
    except ValueError:
        return status, f"no JSON: {answer.text[:200]!r}"
    return status, None


async def fuzz(
    url: str, seed: int, num_cases: int, routes: dict[str, tuple[int, Draw]]
) -> tuple[Counter[tuple[str, str]], list[Body]]:
    """Send `num_cases` requests, sixteen at a time; return how many had which status, and what was wrong."""
    rng, counts, wrong = random.Random(seed), Counter[tuple[str, str]](), list[Body]()
    left = num_cases

    async def sender(client: httpx2.AsyncClient) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            path, body = request(rng, routes)
            status, fault = await send(client, path, body)
            counts[path, status] += 1
            if fault is not None:
                wrong.append({"path": path, "status": status, "fault": fault, "body": body.decode()[:2000]})
                print(json.dumps(wrong[-1]), flush=True)
            if counts.total() % 5000 == 0:
                print(f"{counts.total()} cases, {len(wrong)} wrong", flush=True)

    headers = {"content-type": "application/json"}
    limits = httpx2.Limits(max_keepalive_connections=16)
    async with httpx2.AsyncClient(base_url=url, timeout=120, headers=headers, limits=limits) as client:
        await asyncio.gather(*(sender(client) for _ in range(16)))
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[Body] = []
    is_same = True
    shares = {
        "generate": (args.cases * 98 // 100, ROUTES),
        "embed": (args.cases - args.cases * 98 // 100, EMBED_ROUTES),
    }
    for task, (num_cases, routes) in shares.items():
        port = free_port()
        flags = ["--port", str(port), "--task", task, "--max-model-len", "512", "--max-queued-requests", "64"]
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, "-m", "server.cli", "serve", *flags]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            with running(program, port, Path(folder) / "log", environment) as server:
                server.wait_ready(900)
                engine = server.engine_pid()
                more, found = asyncio.run(fuzz(server.url, args.seed, num_cases, routes))
                counts, wrong = counts + more, wrong + found
                if task == "generate" and (blamed := server.value("hallmark_nonfinite_logits_total")):
                    wrong.append({"fault": f"hallmark_nonfinite_logits_total is {blamed:g}"})
                is_same = is_same and server.engine_pid() == engine and server.status_of("/readyz") == 200
    by_route: dict[str, dict[str, int]] = {}
    for (path, status), num in sorted(counts.items()):
        by_route.setdefault(path, {})[status] = num
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    result = {
        "command": " ".join(["python", "trials/fuzz_posts.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "cases": counts.total(),
        "statuses_by_route": by_route,
        "wrong": wrong[:100],
        "engine_is_the_same_process": is_same,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("cases", "statuses_by_route", "engine_is_the_same_process")}))
    print(f"{len(wrong)} wrong")
    return 0 if is_same and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
