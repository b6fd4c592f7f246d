"""Writers of calls, one a format: what a model of that format writes, as its chat template has it."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.settings import ReasoningParser, ToolCallParser
from support.answers.drawn import Call, dumped

Chance = random.Random
_FORM, _REASONING = ToolCallParser, ReasoningParser


class First(random.Random):
    """Takes the first of what may be written: the usual."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 0.0


def _bare(value: Any, chance: Chance) -> str:
    return value if isinstance(value, str) else dumped(value, chance)


def _glm(line: str, head: str = "", suffix: str = "") -> Callable[[Call, Chance], str]:
    def written(call: Call, chance: Chance) -> str:
        key, value = f"arg_key{suffix}", f"arg_value{suffix}"
        fields = [
            f"<{key}>{name}</{key}>{line}<{value}>{_bare(it, chance)}</{value}>{line}" for name, it in call[1].items()
        ]
        return f"<tool_call{suffix}>{call[0]}{head}{line}{''.join(fields)}</tool_call{suffix}>"

    return written


def _hy(suffix: str) -> Callable[[list[Call], Chance], str]:
    def written(calls: list[Call], chance: Chance) -> str:
        one = _glm("\n", f"<tool_sep{suffix}>", suffix)
        inside = "".join(f"{one(call, chance)}\n" for call in calls)
        return f"<tool_calls{suffix}>\n{inside}</tool_calls{suffix}>"

    return written


def _qwen(call: Call, chance: Chance) -> str:
    fields = (f"<parameter={key}>\n{_bare(it, chance)}\n</parameter>\n" for key, it in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{''.join(fields)}</function>\n</tool_call>"


def _seed(call: Call, chance: Chance) -> str:
    """A call as Seed-OSS's template has it, which writes what is no string as Python does."""
    python = chance.random() < 0.5
    values = {
        key: it if isinstance(it, str) else str(it) if python else dumped(it, chance) for key, it in call[1].items()
    }
    fields = (f"<parameter={key}>{it}</parameter>\n" for key, it in values.items())
    return f"<seed:tool_call>\n<function={call[0]}>\n{''.join(fields)}</function>\n</seed:tool_call>"


def _minimax(calls: list[Call], chance: Chance) -> str:
    def one(call: Call) -> str:
        fields = (f'<parameter name="{key}">{_bare(it, chance)}</parameter>\n' for key, it in call[1].items())
        return f'<invoke name="{call[0]}">\n{"".join(fields)}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(map(one, calls))}</minimax:tool_call>"


def _kimi(calls: list[Call], chance: Chance) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(it, chance)}<|tool_call_end|>"
        for number, (name, it) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def _deepseek_v3(calls: list[Call], chance: Chance) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(it, chance)}\n```<｜tool▁call▁end｜>"
        for name, it in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: list[Call], chance: Chance) -> str:
    written = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(it, chance)}<｜tool▁call▁end｜>" for name, it in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _functionary_v31(call: Call, chance: Chance) -> str:
    return f"<function={call[0]}>{dumped(call[1], chance)}</function>"


def _functionary_v32(calls: list[Call], chance: Chance) -> str:
    return ">>>".join(f"{name}\n{dumped(it, chance)}" for name, it in calls)


def _array(opening: str, closing: str = "") -> Callable[[list[Call], Chance], str]:
    def written(calls: list[Call], chance: Chance) -> str:
        array = dumped([{"name": name, "arguments": it} for name, it in calls], chance)
        return f"{opening}{chance.choice(['', ' '])}{array}{closing}"

    return written


def _python(value: Any, chance: Chance) -> str:
    if isinstance(value, str) and chance.random() < 0.3:
        return json.dumps(value)
    return repr(value)


def _python_calls(opening: str, between: str, closing: str) -> Callable[[list[Call], Chance], str]:
    def written(calls: list[Call], chance: Chance) -> str:
        texts = (
            f"{name}({', '.join(f'{key}={_python(it, chance)}' for key, it in fields.items())})"
            for name, fields in calls
        )
        return f"{opening}{between.join(texts)}{closing}"

    return written


def _each(one: Callable[[Call, Chance], str], between: str = "\n") -> Callable[[list[Call], Chance], str]:
    """Calls one by one, in lines or not."""

    def written(calls: list[Call], chance: Chance) -> str:
        return chance.choice([between, "\n", ""]).join(one(call, chance) for call in calls)

    return written


@dataclass(frozen=True)
class Writer:
    """A format: how calls are written in it, its reasoning, and what no text in it can hold.

    openings    what begins a call: no content has it, and no reasoning
    not_in_text what ends an argument that is a string
    """

    form: ToolCallParser
    calls: Callable[[list[Call], Chance], str]
    openings: tuple[str, ...]
    not_in_text: tuple[str, ...] = ()
    reasoning: ReasoningParser = ReasoningParser.THINK
    think: tuple[str, str] = ("<think>", "</think>")

    def answer(self, reasoning: str, before: str, calls: list[Call], behind: str, chance: Chance) -> str:
        opened, closed = self.think
        thought = f"{opened}{reasoning}{closed}" if reasoning else ""
        if self.form is _FORM.FUNCTIONARY_V32:
            messages = [
                f"all\n{before}" if before else "",
                self.calls(calls, chance),
                f"all\n{behind}" if behind else "",
            ]
            return thought + ">>>".join(filter(None, messages))
        return thought + before + (self.calls(calls, chance) if calls else "") + behind


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_HY_THINK = ("<think:opensource>", "</think:opensource>")
WRITERS = {
    "glm45": Writer(_FORM.GLM45, _each(_glm("\n")), ("<tool_call>",), ("</arg_value>",), _REASONING.GLM45),
    "glm47": Writer(_FORM.GLM47, _each(_glm(""), ""), ("<tool_call>",), ("</arg_value>",), _REASONING.GLM45),
    "poolside_v1": Writer(
        _FORM.POOLSIDE_V1, _each(_glm("\n")), ("<tool_call>",), ("</arg_value>",), _REASONING.POOLSIDE_V1
    ),
    "hy_v3": Writer(
        _FORM.HY_V3, _hy(":opensource"), ("<tool_call",), ("</arg_value",), _REASONING.HY_V3, _HY_THINK
    ),
    "hy_v3 plain": Writer(_FORM.HY_V3, _hy(""), ("<tool_call",), ("</arg_value",), _REASONING.HY_V3),
    "minimax_m2": Writer(
        _FORM.MINIMAX_M2, _minimax, ("<minimax:tool_call>", '<invoke name="'), ("</parameter>",), _REASONING.MINIMAX_M2
    ),
    "seed_oss": Writer(
        _FORM.SEED_OSS, _each(_seed), ("<seed:tool_call>", "<function="), ("</parameter>",), _REASONING.SEED_OSS,
        ("<seed:think>", "</seed:think>"),
    ),
    "qwen3_coder": Writer(
        _FORM.QWEN3_CODER, _each(_qwen), ("<tool_call>", "<function="), ("<parameter=", "</parameter>", "</function>")
    ),
    "step3p5": Writer(
        _FORM.STEP3P5, _each(_qwen), ("<tool_call>", "<function="), ("<parameter=", "</parameter>", "</function>"),
        _REASONING.STEP3P5,
    ),
    "kimi_k2": Writer(
        _FORM.KIMI_K2, _kimi, ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), (), _REASONING.KIMI_K2
    ),
    "deepseek_v3": Writer(_FORM.DEEPSEEK_V3, _deepseek_v3, _DEEPSEEK, (), _REASONING.DEEPSEEK_V3),
    "deepseek_v31": Writer(_FORM.DEEPSEEK_V31, _deepseek_v31, _DEEPSEEK, (), _REASONING.DEEPSEEK_V3),
    "functionary_v3.1": Writer(_FORM.FUNCTIONARY_V31, _each(_functionary_v31, ""), ("<function=",)),
    "functionary_v3.2": Writer(_FORM.FUNCTIONARY_V32, _functionary_v32, (">>>",)),
    "granite": Writer(_FORM.GRANITE, _array("<|tool_call|>"), ("<|tool_call|>", "<tool_call>"), (), _REASONING.GRANITE),
    "phi4_mini_json": Writer(_FORM.PHI4_MINI, _array("functools"), ("functools", "<|tool_call|>")),
    "phi4_mini_json marks": Writer(
        _FORM.PHI4_MINI, _array("<|tool_call|>", "<|/tool_call|>"), ("functools", "<|tool_call|>")
    ),
    "hunyuan_a13b": Writer(_FORM.HUNYUAN_A13B, _array("<tool_calls>", "</tool_calls>"), ("<tool_calls>",)),
    "nemotron_json": Writer(
        _FORM.NEMOTRON_JSON, _array("<TOOLCALL>", "</TOOLCALL>"), ("<TOOLCALL>",), (), _REASONING.NEMOTRON_V3
    ),
    "pythonic": Writer(_FORM.PYTHONIC, _python_calls("[", ", ", "]"), ("<|python_tag|>",)),
    "lfm2": Writer(
        _FORM.LFM2, _python_calls("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"), ("<|tool_call_start|>",)
    ),
    "olmo3": Writer(_FORM.OLMO3, _python_calls("<function_calls>", "\n", "</function_calls>"), ("<function_calls>",)),
}  # fmt: skip
