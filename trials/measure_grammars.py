"""Quality and cost of answers bound by grammars: a program, run by hand; its results are in docs/benchmarks.

    python trials/measure_grammars.py random URL NUM      random schemas against a running server
    python trials/measure_grammars.py hostile             time and memory of hostile grammars
    python trials/measure_grammars.py masks               times of masks for 128,000 tokens and 32 rows
    python trials/measure_grammars.py streams URL         time per token of 32 streams, with and without

Each prints one JSON object.
"""

import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import llguidance
import torch

from server.engine.execution.grammars import BoundRow, GrammarMatcher, Grammars
from server.errors import InvalidGrammar
from server.grammar.checker import GrammarChecker
from server.grammar.compiled import byte_tokenizer, compiled
from server.grammar.requested import json_grammar, lark_grammar, regex_grammar
from server.protocol.messages import Grammar
from server.settings import DEMO_MODEL

WORDS = ("name", "age", "city", "tags", "size", "kind", "note", "unit", "date", "total")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "age", "tags", "address", "kind"],
    "additionalProperties": False,
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are bounded: random weights hardly ever close a string of their own accord."""
    kinds = ["string", "pattern", "format", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "object", "array", "anyOf", "ref"] if depth < 3 else []
    kind = rng.choice(kinds) if depth else "object"
    if kind == "string":
        least = rng.choice([0, 0, 1, 3])
        return {"type": "string", "minLength": least, "maxLength": least + rng.choice([0, 1, 5, 12])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,8}$", "^[A-Z]{3}-\\d{2,4}$", "^(yes|no|maybe)$"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])}
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 9, 12345])}
    if kind == "number":
        low = rng.randint(-50, 50)
        return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + 40}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind in ("enum", "const"):
        values: list[Any] = [
            rng.choice(["a", 'q"uote', "ü", 1, -2.5, None, True, ["x", 1], {"k": 1}]) for _ in range(4)
        ]
        return {"const": values[0]} if kind == "const" else {"enum": values}
    if kind == "array":
        least = rng.choice([0, 1, 2])
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.choice([0, 1, 2])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.choice([2, 3]))]}
    if kind == "ref":
        return {"$ref": "#/$defs/shared"}
    names = rng.sample(WORDS, rng.choice([1, 2, 3, 5]))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


async def random_answers(url: str, num: int) -> dict[str, object]:
    """Ask a server for an answer to each of `num` random schemas, 48 at a time."""
    counts: Counter[str] = Counter()
    wrong: list[int] = []
    tokens: list[int] = []
    gate = asyncio.Semaphore(48)
    started_at = time.monotonic()

    async def ask(client: httpx2.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        shared = random_schema(rng, 3)
        schema = random_schema(rng) | {"$defs": {"shared": shared}}
        form = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
        body = {"messages": [{"role": "user", "content": f"{seed}"}], "response_format": form, "max_tokens": 1500}
        async with gate:
            answer = await client.post("/v1/chat/completions", json=body | {"seed": seed, "temperature": 1.0})
        if answer.status_code != 200:
            counts[f"status {answer.status_code}"] += 1
            wrong.append(seed)
            return
        choice = answer.json()["choices"][0]
        counts[choice["finish_reason"]] += 1
        tokens.append(answer.json()["usage"]["completion_tokens"])
        if choice["finish_reason"] != "stop":
            return
        try:
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(
                json.loads(choice["message"]["content"])
            )
            counts["valid"] += 1
        except (ValueError, jsonschema.ValidationError):
            counts["not valid"] += 1
            wrong.append(seed)

    async with httpx2.AsyncClient(base_url=url, timeout=1800) as client:
        await asyncio.gather(*(ask(client, seed) for seed in range(num)))
    return {
        "schemas": num,
        **counts,
        "wrong_seeds": sorted(wrong)[:20],
        "tokens_p50": statistics.median(tokens),
        "tokens_max": max(tokens),
        "s": round(time.monotonic() - started_at, 1),
    }


def hostile_grammars() -> Iterator[tuple[str, Grammar]]:
    def loop(keyword: str, length: int) -> dict[str, Any]:
        defs: dict[str, Any] = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(length)}
        return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{length}": {"type": "string"}}}

    deep: dict[str, Any] = {"type": "string"}
    for _ in range(11):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2200)}}
    cross = [{"anyOf": [{"properties": {f"p{i}": {"const": value}}} for value in (0, 1)]} for i in range(18)]
    rows = {"type": "array", "maxItems": 10**9, "minItems": 10**9, "items": {"type": "string", "maxLength": 10**9}}
    yield "allOf of 2^24 parts by $ref", json_grammar(loop("allOf", 24), "p")
    yield "anyOf of 2^24 parts by $ref", json_grammar(loop("anyOf", 24), "p")
    yield "$ref to itself", json_grammar({"$ref": "#"}, "p")
    yield (
        "$ref through a loop",
        json_grammar({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "p"),
    )
    yield "allOf over anyOf, 2^18 cases", json_grammar({"allOf": cross}, "p")
    yield "2,200 optional properties", json_grammar(many, "p")
    yield "4,000 values of an enum", json_grammar({"enum": [f"value {i}" for i in range(4000)]}, "p")
    yield "10^9 items of 10^9 characters", json_grammar(rows, "p")
    yield "a prime multipleOf", json_grammar({"type": "integer", "multipleOf": 982451653}, "p")
    yield (
        "2^14 nested objects",
        json_grammar(deep, "p") if len(json.dumps(deep)) < 64 * 1024 else regex_grammar("a", "p"),
    )
    yield "repetitions within repetitions", regex_grammar("((((a{1,100}){1,100}){1,100}){1,100}){1,100}", "p")
    yield "10^9 repetitions", regex_grammar("(foo|bar){1000000000}", "p")
    yield "exponential states", regex_grammar("(a|b)*a(a|b){24}", "p")
    yield "counted classes", regex_grammar(r"(\w{0,1000}\d{0,1000}){0,1000}", "p")
    yield "5,000 groups", regex_grammar("(" * 5000 + "a" + ")" * 5000, "p")
    yield "left recursion, ambiguous", lark_grammar('start: start start | "a" | ""', "p")
    yield "10^6 rules", lark_grammar('start: ("a"|"b"){1,1000000}', "p")
    yield "64 KiB of alternatives", lark_grammar("start: " + " | ".join(f'"{i:x}"' for i in range(7000)), "p")


def hostile() -> dict[str, object]:
    """Check each hostile grammar as the API does; then let random tokens follow those that pass, as the engine does."""
    checker, found = GrammarChecker(), {}
    rng, tokens = random.Random(1), byte_tokenizer()
    asyncio.run(checker.check(regex_grammar("a", "p")))  # the process has started
    for name, grammar in hostile_grammars():
        started_at, verdict = time.monotonic(), "passes"
        try:
            asyncio.run(checker.check(grammar))
        except InvalidGrammar as error:
            verdict = error.message[:120]
        row: dict[str, object] = {"check_ms": round(1e3 * (time.monotonic() - started_at), 1), "verdict": verdict}
        if verdict == "passes":
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            times, end = followed(Grammars(tokens, (256,)), compiled(tokens, grammar), rng, 400)
            row |= {"worst_mask_ms": round(1e3 * max(times), 2), "tokens": len(times), "end": end[:80]}
            row["more_memory_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        found[name] = row
    checker.close()
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return {"grammars": found, "checking_process_peak_mb": children}


def followed(
    grammars: Grammars, source: llguidance.LLMatcher, rng: random.Random, most: int
) -> tuple[list[float], str]:
    """Return the time of each mask of a random answer in seconds, and how the answer ended."""
    matcher, times = GrammarMatcher(source.deep_copy()), []
    for _ in range(most):
        started_at = time.perf_counter()
        mask = grammars.allowed([BoundRow(0, matcher, ())], 1)
        times.append(time.perf_counter() - started_at)
        try:
            matcher.accept(rng.choice(allowed_ids(mask)))
        except InvalidGrammar as error:
            return times, error.message
        if matcher.is_complete:
            return times, "complete"
    return times, "cut"


def allowed_ids(mask: Any) -> list[int]:
    bits = ((mask[0][:, None] >> torch.arange(32, dtype=mask.dtype)) & 1).flatten()
    found: list[int] = bits.nonzero().flatten().tolist()
    return found


def large_tokenizer(num_tokens: int = 128_000) -> llguidance.LLTokenizer:
    """The demo's tokenizer with random words in place of a real one's: it has as many tokens of each kind."""
    content = json.loads((Path(DEMO_MODEL) / "tokenizer.json").read_text())
    vocab, rng = content["model"]["vocab"], random.Random(0)
    words = [word for word, token_id in vocab.items() if token_id > 260]
    marks = ['"', '{"', '":', '",', 'Ġ"', '"]', "}", "},", "1", "23", "456", "[", "Ċ", "ĠĠ"]
    while len(vocab) < num_tokens:
        word = "".join(rng.choice(words) for _ in range(rng.choice((1, 2, 2, 3))))[:24]
        word = rng.choice(marks) + word[:3] if rng.random() < 0.15 else word
        vocab.setdefault(word, len(vocab))
    return llguidance.LLTokenizer(json.dumps(content), n_vocab=num_tokens + 256, eos_token=[0, 4])


def masks() -> dict[str, object]:
    """Times of all masks of a step, and of moving all matchers on, for 32 answers that random tokens write."""
    started_at = time.monotonic()
    tokens = large_tokenizer()
    found: dict[str, object] = {"tokenizer_s": round(time.monotonic() - started_at, 2), "vocab_size": tokens.vocab_size}
    grammars, rng = Grammars(tokens, (0, 4)), random.Random(0)
    for name, schema in (("any object", {"type": "object"}), ("person", PERSON)):
        started_at = time.perf_counter()
        source = compiled(tokens, json_grammar(schema, "p"))
        compile_ms = 1e3 * (time.perf_counter() - started_at)
        rows = [GrammarMatcher(source.deep_copy()) for _ in range(32)]
        mask_us, accept_us = [], []
        for _ in range(60):
            started_at = time.perf_counter()
            mask = grammars.allowed([BoundRow(index, row, ()) for index, row in enumerate(rows)], 32)
            mask_us.append(1e6 * (time.perf_counter() - started_at))
            chosen = [rng.choice(allowed_ids(mask[index : index + 1])) for index in range(32)]
            started_at = time.perf_counter()
            for row, token_id in zip(rows, chosen, strict=True):
                row.accept(token_id)
            accept_us.append(1e6 * (time.perf_counter() - started_at))
            rows = [GrammarMatcher(source.deep_copy()) if row.is_complete else row for row in rows]
        found[name] = {
            "compile_ms": round(compile_ms, 1),
            **{f"masks_p{p}_us": round(statistics.quantiles(mask_us, n=100)[p - 1]) for p in (50, 90, 99)},
            "accept_p50_us": round(statistics.median(accept_us)),
        }
    return found


STREAMS, STREAM_TOKENS, ROUNDS = 32, 192, 4
_LONG = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3000}}, "required": ["a"]}
_PEOPLE = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 400,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "role": {"enum": ["admin", "user", "guest"]},
                },
                "required": ["name", "age", "role"],
            },
        }
    },
    "required": ["people"],
}
# No answer can end before its last token.
STREAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "a regular expression": {"structured_outputs": {"regex": "[a-z ]{3000}"}},
    "a long text in an object": {"structured_outputs": {"json": _LONG}},
    "many people": {"structured_outputs": {"json": _PEOPLE}},
    "log probabilities of 5": {"logprobs": 5},
    "log probabilities of 20": {"logprobs": 20},
}


async def streams(url: str) -> dict[str, object]:
    """Time per token of 32 streams against a running server, plain, bound and with log probabilities; in turns."""
    samples: dict[str, list[float]] = {name: [] for name in STREAMED}
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=httpx2.Limits(max_connections=STREAMS)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for is_counted in (False, *[True] * ROUNDS):
            for name, fields in STREAMED.items():
                time_ms = await _ms_a_token(client, {"model": model, **fields})
                samples[name] += [time_ms] if is_counted else []
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "streams": STREAMS,
        "tokens": STREAM_TOKENS,
        "ms_a_token": samples,
        "over_plain": {name: round(median / medians["plain"], 4) for name, median in medians.items()},
    }


async def _ms_a_token(client: httpx2.AsyncClient, fields: dict[str, Any]) -> float:
    """Milliseconds of a token while all streams run."""

    async def times_of(index: int) -> list[float]:
        prompt = {"prompt": [100 + index] * 100, "temperature": 0.7, "seed": index}
        body = {**fields, **prompt, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit((await answer.aread()).decode())
            return [time.perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {")]

    found = await asyncio.gather(*(times_of(index) for index in range(STREAMS)))
    began_at, ended_at = max(times[0] for times in found), min(times[-1] for times in found)
    num_tokens = statistics.median(sum(began_at <= at <= ended_at for at in times) for times in found)
    return 1e3 * (ended_at - began_at) / (num_tokens - 1)


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "random":
        found = asyncio.run(random_answers(rest[0], int(rest[1])))
    elif command == "streams":
        found = asyncio.run(streams(rest[0]))
    else:
        found = {"hostile": hostile, "masks": masks}[command]()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()[:12]
    about = {"llguidance": llguidance.__version__, "commit": head, "command": command}
    print(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
