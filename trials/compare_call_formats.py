"""Compare our parsers of calls with vLLM's and SGLang's own, on seeded well-formed answers; no GPU.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23 partial-json-parser orjson
    unzip -q vllm-*.whl 'vllm/*.py' -d PEERS; unzip -q sglang-*.whl 'sglang/*.py' -d PEERS
    unzip -q partial_json_parser-*.whl -d PEERS; unzip -q orjson-*.whl -d PEERS
    PYTHONPATH=.:tests .venv/bin/python trials/compare_call_formats.py PEERS > docs/benchmarks/call-formats.json

The peers' files are loaded as they are; what they import besides is replaced by stand-ins. An answer is read alike
where the names and JSON values of all its calls are. Names are identifiers and texts are short; texts that are null,
arguments of several types, and numbers of more than 17 digits are left out: there the peers differ from each other.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

from pydantic import BaseModel, ConfigDict

from server.text.answer.deltas import whole_answer
from server.text.answer.formats import FORMATS
from server.text.answer.syntax import AnswerSyntax
from support.answers.drawn import Call, ToolSchemas, drawn_calls, drawn_tools
from support.answers.writers import WRITERS

SEED, NUM_ANSWERS = 34, 1000
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
TEXTS = (
    "Zürich",
    "☂ rain",
    'a "quoted" word',
    "back\\slash",
    "{brace}",
    "x < y > z",
    "two\nlines",
    "日本",
    "1",
    "true",
)
LEFT_OUT = ("from", "zip-code", "none")  # of several types, or no name of Python
VLLM = {
    "glm45": ("parser.glm47_moe", "Glm47MoeParser"),
    "glm47": ("parser.glm47_moe", "Glm47MoeParser"),
    "poolside_v1": ("tool_parsers.poolside_v1_tool_parser", "PoolsideV1ToolParser"),
    "hy_v3 plain": ("tool_parsers.hy_v3_tool_parser", "HYV3ToolParser"),
    "minimax_m2": ("parser.minimax_m2", "MinimaxM2Parser"),
    "seed_oss": ("parser.seed_oss", "SeedOssParser"),
    "qwen3_coder": ("parser.qwen3", "Qwen3Parser"),
    "step3p5": ("parser.step3p5", "Step3p5Parser"),
    "kimi_k2": ("parser.kimi_k2", "KimiK2Parser"),
    "deepseek_v3": ("tool_parsers.deepseekv3_tool_parser", "DeepSeekV3ToolParser"),
    "deepseek_v31": ("tool_parsers.deepseekv31_tool_parser", "DeepSeekV31ToolParser"),
    "deepseek_v32": ("parser.deepseek_v32", "DeepSeekV32Parser"),
    "mimo": ("parser.mimo", "MiMoParser"),
    "granite": ("parser.granite", "GraniteParser"),
    "phi4_mini_json": ("tool_parsers.phi4mini_tool_parser", "Phi4MiniJsonToolParser"),
    "hunyuan_a13b": ("tool_parsers.hunyuan_a13b_tool_parser", "HunyuanA13BToolParser"),
    "pythonic": ("tool_parsers.pythonic_tool_parser", "PythonicToolParser"),
    "lfm2": ("tool_parsers.lfm2_tool_parser", "Lfm2ToolParser"),
    "olmo3": ("tool_parsers.olmo3_tool_parser", "Olmo3PythonicToolParser"),
}
SGLANG = {
    "glm45": ("glm4_moe_detector", "Glm4MoeDetector"),
    "glm47": ("glm47_moe_detector", "Glm47MoeDetector"),
    "poolside_v1": ("poolside_v1_detector", "PoolsideV1Detector"),
    "hy_v3 plain": ("hunyuan_detector", "HunyuanDetector"),
    "minimax_m2": ("minimax_m2", "MinimaxM2Detector"),
    "qwen3_coder": ("qwen3_coder_detector", "Qwen3CoderDetector"),
    "kimi_k2": ("kimik2_detector", "KimiK2Detector"),
    "deepseek_v3": ("deepseekv3_detector", "DeepSeekV3Detector"),
    "deepseek_v31": ("deepseekv31_detector", "DeepSeekV31Detector"),
    "deepseek_v32": ("deepseekv32_detector", "DeepSeekV32Detector"),
    "cohere_command4": ("cohere_command4_detector", "CohereCommand4Detector"),
    "mimo": ("mimo_detector", "MiMoDetector"),
    "pythonic": ("pythonic_detector", "PythonicDetector"),
    "lfm2": ("lfm2_detector", "Lfm2Detector"),
}
# Folders of vLLM that its parsers do not need, or that need a GPU.
STOOD_IN = (
    *("config", "distributed", "engine", "entrypoints.openai.responses", "entrypoints.serve", "inputs", "logger"),
    *("model_executor", "outputs", "platforms", "sampling_params", "tokenizers", "transformers_utils", "v1"),
)
Reader = Callable[[str, ToolSchemas], list[Call]]

# --- stand-ins -------------------------------------------------------------------------------------------------------


class Fields(BaseModel):
    """A model with whatever fields it is given, null where it is given none."""

    model_config = ConfigDict(extra="allow")

    def __getattr__(self, name: str) -> Any:
        return None if name.startswith("__") else (self.__pydantic_extra__ or {}).get(name)


class Made(types.ModuleType):
    """A module with whatever is imported from it: classes for capital names, functions for others."""

    __path__: list[str] = []  # noqa: RUF012 -- what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Fields,), {}) if name[:1].isupper() else MagicMock(name=name)
        if name.endswith("_id"):
            made.return_value = "id"
        setattr(self, name, made)
        return made


class Off:
    """Switches that are all off."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: False)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module that is missing, or named."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_missing = any(fullname == name or fullname.startswith(f"{name}.") for name in self.names)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_missing else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Made(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the stand-in as it is made."""


def peer(folder: str, name: str) -> Callable[[str], types.ModuleType]:
    """Return what imports a peer's module without the peer's own start."""
    finder = StandIns({f"vllm.{it}" for it in STOOD_IN} | {"mistral_common", "xgrammar"})
    sys.meta_path.insert(0, finder)
    for package in {"vllm": ["vllm"], "sglang": ["sglang", "sglang.srt"]}[name]:
        module = types.ModuleType(package)
        module.__path__ = [f"{folder}/{package.replace('.', '/')}"]
        sys.modules[package] = module
    made = {"vllm": ("vllm.entrypoints", "vllm.renderers", "vllm.envs")}.get(
        name, ("sglang.srt.entrypoints", "sglang.srt.environ")
    )
    finder.names |= set(made)
    own = set(sys.modules)

    def load(module: str) -> types.ModuleType:
        while True:
            try:
                return importlib.import_module(module)
            except ModuleNotFoundError as error:
                missing = str(error.name)
                if missing in finder.names:
                    raise
                finder.names.add(missing if missing.startswith(name) else missing.partition(".")[0])
                for it in [it for it in sys.modules if it.startswith(name) and it not in own]:
                    del sys.modules[it]

    return load


class Vocabulary:
    """A tokenizer of a format's marks."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.vocab = {mark: 1000 + index for index, mark in enumerate(marks)}
        self.all_special_tokens = [*marks]
        self.init_kwargs: dict[str, Any] = {}
        self.chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.vocab.get(text, 1)]


def of_vllm(load: Callable[[str], types.ModuleType], name: str) -> Reader:
    module, kind = VLLM[name]
    load("vllm.envs").VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS = 5  # type: ignore[attr-defined]
    made = getattr(load(f"vllm.{module}"), kind)
    tool = load("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionToolsParam
    marks = (*FORMATS[WRITERS[name].form].parser({}).marks, "<think>", "</think>", "<seed:think>", "</seed:think>")

    def read(text: str, tools: ToolSchemas) -> list[Call]:
        given = [tool(type="function", function=Fields(name=it, parameters=schema)) for it, schema in tools.items()]
        options = {"chat_template_kwargs": {"enable_thinking": False}} if module.startswith("parser") else {}
        parser = made(Vocabulary(marks), given, **options)
        request = Fields(tools=given, tool_choice="auto", include_reasoning=True)
        found = parser.extract_tool_calls("</think>" * (name == "step3p5") + text, request)
        return [(it.function.name, json.loads(it.function.arguments)) for it in found.tool_calls]

    return read


def of_sglang(load: Callable[[str], types.ModuleType], name: str) -> Reader:
    module, kind = SGLANG[name]
    load("sglang.srt.environ").envs = Off()  # type: ignore[attr-defined]
    made = getattr(load(f"sglang.srt.function_call.{module}"), kind)

    def read(text: str, tools: ToolSchemas) -> list[Call]:
        given = [Fields(type="function", function=Fields(name=it, parameters=schema)) for it, schema in tools.items()]
        return [(it.name, json.loads(it.parameters or "{}")) for it in made().detect_and_parse(text, given).calls]

    return read


# --- the comparison --------------------------------------------------------------------------------------------------


def answers(name: str) -> Iterator[tuple[str, ToolSchemas, list[Call]]]:
    """Yield answers with at least one call."""
    chance = random.Random(f"{SEED} {name}")
    while True:
        drawn = drawn_tools(chance)
        tools = {re.sub(r"\W", "_", it): schema or {"type": "object", "properties": {}} for it, schema in drawn.items()}
        named = dict(zip(drawn, tools, strict=True))
        calls = [(named[it], plain(given, chance)) for it, given in drawn_calls(chance, drawn)]
        if calls:
            yield WRITERS[name].calls(calls, chance), tools, calls


def plain(value: Any, chance: random.Random) -> Any:
    """The value with short texts."""
    if isinstance(value, dict):
        return {key: 0.5 if key == "x" else plain(it, chance) for key, it in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [plain(it, chance) for it in value]
    return chance.choice(TEXTS) if isinstance(value, str) else value


def compared(name: str, read: Reader) -> dict[str, Any]:
    found = {"answers": 0, "same": 0, "example": ""}
    for text, tools, calls in answers(name):
        parser = AnswerSyntax(WRITERS[name].form).parser(tools, "", is_streamed=False)
        assert parser is not None
        ours = whole_answer([*parser.feed(text), *parser.finish()])
        assert [(it.name, json.loads(it.arguments)) for it in ours.calls] == calls, text
        try:
            is_same = read(text, tools) == calls
        except (ValueError, TypeError, AttributeError, KeyError):
            is_same = False
        found["answers"] += 1
        found["same"] += is_same
        found["example"] = found["example"] or ("" if is_same else text)
        if found["answers"] == NUM_ANSWERS:
            return found
    raise AssertionError


@contextmanager
def without_own_modules() -> Iterator[None]:
    """Take out what was put in front of the importer."""
    before = [*sys.meta_path]
    yield
    sys.meta_path[:] = before


def main(folder: str) -> None:
    logging.disable()
    sys.path.append(folder)
    rows: dict[str, dict[str, Any]] = {}
    for package, names, of in (("vllm", VLLM, of_vllm), ("sglang", SGLANG, of_sglang)):
        with without_own_modules():
            load = peer(folder, package)
            for name in names:
                rows.setdefault(name, {})[package] = compared(name, of(load, name))
    print(json.dumps({"versions": VERSIONS, "seed": SEED, "rows": rows}, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
