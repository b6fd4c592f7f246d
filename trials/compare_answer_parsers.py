"""Compare our parsers of answers with vLLM's own and with openai_harmony, on seeded outputs; no GPU, no torch.

    pip download --no-deps vllm==0.26.0 && unzip -q vllm-*.whl 'vllm/*.py' -d PEER
    pip install openai openai-harmony regex ijson partial-json-parser
    python trials/compare_answer_parsers.py PEER [NUM] > docs/benchmarks/answer-parsers.json

vLLM's files are loaded as they are; what they import besides is replaced by stand-ins. openai_harmony needs its
vocabulary (it downloads it, or reads the folder TIKTOKEN_ENCODINGS_BASE). Three questions for each output:

    whole     is our whole answer theirs? (content without white space at its ends, calls by name and JSON value)
    cut       do our pieces join to the same however the text is cut: at every character, and at random places?
    streamed  is our streamed answer our whole one?
"""

import importlib
import importlib.metadata
import itertools
import json
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.deltas import Answer, whole_answer
from server.text.answer.syntax import AnswerSyntax

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "wet": {"type": "boolean"},
    "places": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}
NAMES = ("weather", "get_time", "files.write", "a-b_c")
TOOLS = {name: {"type": "object", "properties": PROPERTIES} for name in NAMES}
WORDS = (
    "Zürich",
    "☂ rain",
    'a "quoted" word',
    "back\\slash",
    "{brace}",
    "x < y > z",
    "two\nlines",
    "日本",
    "",
    " pad ",
    "1",
    "[1]",
)
Result = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls

# --- outputs ---------------------------------------------------------------------------------------------------------


def arguments(chance: random.Random) -> dict[str, Any]:
    values: dict[str, Callable[[], Any]] = {
        "city": lambda: chance.choice(WORDS),
        "days": lambda: chance.randrange(-3, 1000),
        "share": lambda: chance.choice([0.5, -1.25, 3]),
        "wet": lambda: chance.random() < 0.5,
        "places": lambda: chance.choices(WORDS[:6], k=chance.randrange(4)),
        "deep": lambda: {"a": chance.randrange(9), "b": chance.choice(WORDS[:6])},
    }
    return {name: values[name]() for name in chance.sample([*values], chance.randrange(0, 5))}


def as_json(value: Any, chance: random.Random) -> str:
    return json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, None, 1]))


def hermes(calls: list[Any], chance: random.Random) -> str:
    bodies = [as_json({"name": name, "arguments": given}, chance) for name, given in calls]
    return chance.choice(["", "\n", " and "]).join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def llama3_json(calls: list[Any], chance: random.Random) -> str:
    key = chance.choice(["parameters", "arguments"])
    bodies = [as_json({"name": name, key: given}, chance) for name, given in calls]
    return chance.choice(["", "<|python_tag|>"]) + "; ".join(bodies)


def mistral_array(calls: list[Any], chance: random.Random) -> str:
    return "[TOOL_CALLS]" + as_json([{"name": name, "arguments": given} for name, given in calls], chance)


def mistral_named(calls: list[Any], chance: random.Random) -> str:
    mark = chance.choice(["", "[ARGS]"])
    return "".join(f"[TOOL_CALLS]{name}{mark}{as_json(given, chance)}" for name, given in calls)


def qwen3_coder(calls: list[Any], chance: random.Random) -> str:
    def body(name: str, given: dict[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        line = chance.choice(["\n", "\n", ""])
        fields = (f"<parameter={key}>{line}{text}{line}</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function={name}>\n{''.join(fields)}</function>\n</tool_call>"

    return "\n".join(body(*call) for call in calls)


def gemma4(calls: list[Any], chance: random.Random) -> str:  # noqa: ARG001 -- as the others
    def value(it: Any) -> str:
        if isinstance(it, str):
            return f'<|"|>{it}<|"|>'
        if isinstance(it, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in it.items()) + "}"
        return "[" + ",".join(map(value, it)) + "]" if isinstance(it, list) else json.dumps(it)

    return "".join(f"<|tool_call>call:{name}{value(given)}<tool_call|>" for name, given in calls)


def harmony(calls: list[Any], chance: random.Random) -> str:
    head = "<|start|>assistant<|channel|>"
    return "".join(
        f"{head}commentary to=functions.{name} <|constrain|>json<|message|>{as_json(given, chance)}<|call|>"
        for name, given in calls
    )


def think(calls: list[Any], chance: random.Random) -> str:
    opening = chance.choice(["<think>", ""])
    return opening + " ".join(chance.choices(WORDS, k=4)) + chance.choice(["</think>", ""]) + json.dumps(calls)


MARKS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "</function>",
    "{",
    "}",
    '"',
)


def outputs(write: Callable[..., str], num: int, seed: int) -> Iterator[tuple[str, bool]]:
    """Texts, and whether each is as a model ought to write it; four in ten are not."""
    chance = random.Random(seed)
    for _ in range(num):
        calls = [(chance.choice(NAMES), arguments(chance)) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
        before = chance.choice(["", "Let me look. ", "Ja, gern: ☂\n\n"])
        if write is harmony:
            thought = chance.choice(["", "<|channel|>analysis<|message|>Hm, ☂.<|end|><|start|>assistant"])
            text = f"{thought}<|channel|>commentary<|message|>{before or 'Now.'}<|end|>{write(calls, chance)}"
        elif write is think or (write is llama3_json and chance.random() < 0.7):
            text = write(calls, chance)
        else:
            text = before + write(calls, chance)
        is_good = chance.random() < 0.6
        if chance.random() < 0.1:
            text, is_good = before + "No call here.", True
            text = f"<|channel|>final<|message|>{text}" if write is harmony else text
        if not is_good:
            at = chance.randrange(len(text))
            text = chance.choice(
                [
                    text[:at],
                    text[:at] + text[at + chance.randrange(1, 9) :],
                    text[:at] + chance.choice(MARKS) + text[at:],
                    text.replace('"name"', '"nom"', 1),
                ]
            )
        yield text, is_good


# --- their side ------------------------------------------------------------------------------------------------------


class StandIn(types.ModuleType):
    """A module in which every name is a class of that name."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load_vllm(folder: str) -> None:
    """Make vLLM's parsers importable, and nothing else of it."""
    import pydantic

    class Open(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")

    def model(name: str, /, **fields: Any) -> Any:
        return pydantic.create_model(name, __base__=Open, **fields)

    def put(name: str, **values: Any) -> None:
        module = StandIn(name)
        module.__dict__.update(values)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)

    def logger(name: str) -> logging.Logger:
        found = logging.getLogger(name)
        found.disabled = True
        return found

    class Environment(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return 5 if name.endswith("SECONDS") else False

    package = types.ModuleType("vllm")
    package.__path__ = [f"{folder}/vllm"]
    sys.modules["vllm"] = package
    sys.modules["vllm.envs"] = package.envs = Environment("vllm.envs")  # type: ignore[attr-defined]
    called = model("FunctionCall", name=(str, ...), arguments=(str, ...))
    call = model("ToolCall", id=(str, "x"), function=(called, ...))
    piece = model("DeltaFunctionCall", name=(str | None, None), arguments=(str | None, None))
    delta = model(
        "DeltaToolCall",
        id=(str | None, None),
        type=(str | None, None),
        index=(int, ...),
        function=(piece | None, None),
    )
    function = model("Function", name=(str, ...), parameters=(dict | None, None))
    protocol = {
        "FunctionCall": called,
        "ToolCall": call,
        "DeltaFunctionCall": piece,
        "DeltaToolCall": delta,
        "DeltaMessage": model(
            "DeltaMessage", content=(str | None, None), reasoning=(str | None, None), tool_calls=(list[delta], [])
        ),
        "ExtractedToolCallInformation": model(
            "Extracted", tools_called=(bool, ...), tool_calls=(list[call], ...), content=(str | None, None)
        ),
    }
    chat = {
        "ChatCompletionToolsParam": model("ChatTool", function=(function, ...)),
        "ChatCompletionRequest": model(
            "Request", tools=(Any, None), tool_choice=(Any, "auto"), include_reasoning=(bool, True)
        ),
    }
    ids = itertools.count()
    put("vllm.logger", init_logger=logger)
    put("vllm.entrypoints")
    put(
        "vllm.entrypoints.chat_utils",
        make_tool_call_id=lambda *_, **__: f"id{next(ids)}",
        get_tool_call_id_type=lambda _: "random",
    )
    put("vllm.entrypoints.openai")
    for name, values in {"engine": protocol, "chat_completion": chat, "responses": {}}.items():
        put(f"vllm.entrypoints.openai.{name}")
        put(f"vllm.entrypoints.openai.{name}.protocol", **values)
    for name in ("tokenizers", "tokenizers.mistral", "sampling_params", "utils", "parser.metrics", "config"):
        put(f"vllm.{name}")
    put("vllm.utils.mistral", is_mistral_tokenizer=lambda _: False)
    put("vllm.utils.collection_utils", is_list_of=lambda *_: True)
    put("vllm.utils.import_utils", import_from_path=lambda *_: None)
    for name in ("entrypoints.openai.parser", "entrypoints.openai.parser.harmony_utils", "entrypoints.mcp"):
        put(f"vllm.{name}")
    put("vllm.entrypoints.mcp.tool_server")
    for name in ("transformers", "mistral_common", "mistral_common.protocol", "mistral_common.protocol.instruct"):
        put(name)
    put("mistral_common.protocol.instruct.tool_calls")


class Vocabulary:
    """The part of a tokenizer that vLLM's parsers ask for."""

    def __init__(self, *marks: str) -> None:
        self._ids = {mark: 200_000 + i for i, mark in enumerate(marks)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def theirs(kind: str) -> Callable[[str], Result]:
    """Return what gives vLLM's whole answer for a text."""
    if kind == "harmony":
        return harmony_answer()
    chat = sys.modules["vllm.entrypoints.openai.chat_completion.protocol"]
    tools = [
        chat.ChatCompletionToolsParam(type="function", function={"name": name, "parameters": schema})
        for name, schema in TOOLS.items()
    ]
    request = chat.ChatCompletionRequest(tools=tools)
    where, name, marks = {
        "hermes": ("tool_parsers.hermes_tool_parser", "Hermes2ProToolParser", ["<tool_call>", "</tool_call>"]),
        "llama3_json": ("tool_parsers.llama_tool_parser", "Llama3JsonToolParser", ["<|python_tag|>"]),
        "mistral, array": ("tool_parsers.mistral_tool_parser", "MistralToolParser", ["[TOOL_CALLS]"]),
        "mistral, named": ("tool_parsers.mistral_tool_parser", "MistralToolParser", ["[TOOL_CALLS]", "[ARGS]"]),
        "qwen3_coder": ("parser.qwen3", "Qwen3Parser", ["<think>", "</think>", "<tool_call>", "</tool_call>"]),
        "gemma4": ("parser.gemma4", "Gemma4Parser", ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]),
        "think": ("reasoning.deepseek_r1_reasoning_parser", "DeepSeekR1ReasoningParser", ["<think>", "</think>"]),
    }[kind]
    parser_class = getattr(importlib.import_module(f"vllm.{where}"), name)

    def answer(text: str) -> Result:
        if kind == "think":
            reasoning, content = parser_class(Vocabulary(*marks)).extract_reasoning(text, request)
            return (content or "").strip(), reasoning or "", []
        parser = parser_class(Vocabulary(*marks), tools)
        extract = parser.extract_tool_calls_from_content if where.startswith("parser.") else parser.extract_tool_calls
        found = extract(text, request)
        calls = [(it.function.name.strip(), value_of(it.function.arguments)) for it in found.tool_calls]
        return (found.content or "").strip(), "", calls

    return answer


def harmony_answer() -> Callable[[str], Result]:
    from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def answer(text: str) -> Result:
        tokens = encoding.encode(text, allowed_special="all")
        content, reasoning, calls = [], [], []
        for message in encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT):
            said = message.content[0].text if message.content else ""
            if message.recipient and message.recipient.split(".")[0] not in ("python", "browser", "container"):
                calls.append((message.recipient.removeprefix("functions."), value_of(said)))
            elif message.channel == "analysis":
                reasoning.append(said)
            else:
                content.append(said)
        return "\n".join(content).strip(), "\n".join(reasoning), calls

    return answer


# --- ours ------------------------------------------------------------------------------------------------------------


def value_of(arguments: str) -> str:
    """Arguments as one text for one value; as they are where they are no JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments.strip()


def ours(kind: str, pieces: list[str], *, is_streamed: bool) -> Result:
    calls, reasoning = {
        "harmony": (ToolCallParser.HARMONY, ReasoningParser.HARMONY),
        "gemma4": (ToolCallParser.GEMMA, ReasoningParser.NONE),
        "mistral, array": (ToolCallParser.MISTRAL, ReasoningParser.NONE),
        "mistral, named": (ToolCallParser.MISTRAL, ReasoningParser.NONE),
        "think": (ToolCallParser.HERMES, ReasoningParser.THINK_FIRST),
    }.get(kind) or (ToolCallParser(kind), ReasoningParser.NONE)
    parser = AnswerSyntax(calls, reasoning).parser(None if kind == "think" else TOOLS, "", is_streamed=is_streamed)
    assert parser is not None
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    it: Answer = whole_answer(deltas + parser.finish())
    return it.content.strip(), it.reasoning, [(call.name, value_of(call.arguments)) for call in it.calls]


def difference(whole: Result, wanted: Result) -> str:
    if whole[2] == wanted[2]:
        return "only_content_differs"
    if len(whole[2]) == len(wanted[2]):
        return "arguments_differ"
    return "we_call_more" if len(whole[2]) > len(wanted[2]) else "peer_calls_more"


def compared(kind: str, write: Callable[..., str], num: int) -> dict[str, Any]:
    answer, chance = theirs(kind), random.Random(0)
    row: dict[str, Any] = dict.fromkeys(("outputs", "good", "good_same", "bad", "bad_same", "peer_raises"), 0)
    kinds = ("only_content_differs", "arguments_differ", "we_call_more", "peer_calls_more")
    row |= {f"bad_{name}": 0 for name in kinds}
    row |= {"cut_same": 0, "good_streamed_same": 0, "examples": []}
    for text, is_good in outputs(write, num, seed=17):
        whole = ours(kind, [text], is_streamed=False)
        streamed = ours(kind, [text], is_streamed=True)
        cuts = [[*text]]
        for _ in range(8):
            places = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(6))})
            cuts.append([text[a:b] for a, b in itertools.pairwise(places)])
        is_cut_same = all(ours(kind, cut, is_streamed=True) == streamed for cut in cuts)
        is_cut_same &= all(ours(kind, cut, is_streamed=False) == whole for cut in cuts[:2])
        group = "good" if is_good else "bad"
        row["outputs"] += 1
        row[group] += 1
        row["cut_same"] += is_cut_same
        row["good_streamed_same"] += is_good and streamed == whole
        try:
            wanted = answer(text)
        except Exception:
            row["peer_raises"] += 1
            continue
        if kind == "llama3_json" and wanted[2]:
            whole = ("", *whole[1:])  # text beside calls, which vLLM drops
        row[f"{group}_same"] += whole == wanted
        if whole == wanted:
            continue
        if not is_good:
            row[f"bad_{difference(whole, wanted)}"] += 1
        if len(row["examples"]) < 3 or is_good:
            row["examples"].append({"is_good": is_good, "text": text, "ours": whole, "theirs": wanted})
    return row


def main() -> None:
    load_vllm(sys.argv[1])
    num = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    writers = {
        "hermes": hermes,
        "llama3_json": llama3_json,
        "mistral, array": mistral_array,
        "mistral, named": mistral_named,
        "qwen3_coder": qwen3_coder,
        "gemma4": gemma4,
        "harmony": harmony,
        "think": think,
    }
    rows = {kind: compared(kind, write, num) for kind, write in writers.items()}
    versions = {"vllm": "0.26.0", "openai_harmony": importlib.metadata.version("openai-harmony")}
    print(json.dumps({"versions": versions, "seed": 17, "rows": rows}, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
