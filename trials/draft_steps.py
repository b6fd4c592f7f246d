"""Times decode steps of a hybrid with and without drafts of its own head, with planted acceptance.

    PYTHONPATH=. python trials/draft_steps.py --layers 40 --out draft-steps.json    # one minute of an H200

The model has Qwen3.5-35B-A3B's sizes, of `--layers`, and dummy weights. The head really drafts and the model really
verifies; whether a drafted token holds is drawn, so that rows get as many tokens a step as with a trained head. Rows
decode from 100 tokens of context on. What drafts are held to is an engine without a head in a process of its own, whose
steps are launched ahead, as they are served; one with a head that drafts nothing is timed beside it. `token_ms` has the
tokens that were drawn, `expected_ms` as many as are drawn in the mean, `share` is that of the engine without a head.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import server.engine.startup.builder as startup
from qualification.decision.decision import Policy
from server.engine.execution.capture import CudaCapture
from server.engine.execution.graph_keys import GraphSizes
from server.engine.execution.head_steps import HeadSteps
from server.engine.scheduling.engine import Engine
from server.engine.scheduling.head_drafter import HeadDrafter
from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, LoadFormat, Settings

CONTEXT, NUM_TOKENS, MOST, SHARE = 100, 160, 3, 0.65
CONFIG = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 248320,
    "hidden_size": 2048, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "partial_rotary_factor": 0.25,
}  # fmt: skip


class Fewer(HeadDrafter):
    """Drafts at most so many tokens of a sequence."""

    most = MOST

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        return super().draft([(seq, min(most, self.most)) for seq, most in wanted])


class Planted(Engine):
    """Believes drafts by a draw."""

    rng = random.Random(5)

    def _num_holding(self, seq: Sequence, first: int, sampled: list[int]) -> tuple[int, int]:
        num_holding = num_accepted = 0
        for position, token_id in enumerate(sampled, start=first):
            holds = position - first < seq.num_drafted and self.rng.random() < SHARE
            seq.tokens[position] = token_id
            num_holding, num_accepted = num_holding + 1, num_accepted + holds
            if not holds or seq.finish_reason(position + 1) is not None:
                break
        return num_holding, num_accepted


def timed(engine: Engine, num_rows: int, rng: random.Random) -> tuple[float, float]:
    """Return seconds a step, and tokens of a row in one, while all rows decode."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for row in range(num_rows):
        engine.submit(Submit(str(row), [rng.randrange(1000, 200_000) for _ in range(CONTEXT)], sampling))
    began = ended = 0.0
    num_steps = num_tokens = 0
    while engine.has_work:
        output = engine.step()
        now = time.perf_counter()
        if output is None or output.record.num_waiting_tokens or output.record.num_running < num_rows:
            continue
        if began:
            num_steps, ended = num_steps + 1, now
            num_tokens += sum(len(it.token_ids) for it in output.deltas)
        began = began or now
    return (ended - began) / num_steps, num_tokens / num_steps / num_rows


def timed_row(engine: Engine, num_rows: int, num_drafted: int, rng: random.Random) -> dict[str, Any]:
    seconds, tokens = timed(engine, num_rows, rng)
    expected = sum(SHARE**place for place in range(1 + num_drafted))
    return {"rows": num_rows, "drafted": num_drafted, "step_ms": round(1e3 * seconds, 4),
            "tokens_a_step": round(tokens, 4), "token_ms": round(1e3 * seconds / tokens, 4),
            "expected_ms": round(1e3 * seconds / expected, 4)}  # fmt: skip


def without_head(asked: argparse.Namespace, folder: Path) -> dict[int, dict[str, Any]]:
    """Return what an engine without a head takes, by rows."""
    out = folder / "without.json"
    rows = map(str, asked.rows)
    command = (sys.executable, __file__, "--without-head", "--layers", str(asked.layers), "--out", str(out), "--rows")
    subprocess.run([*command, *rows], check=True)
    return {row["rows"]: row for row in json.loads(out.read_text())["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 8, 16])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cache-dir", type=Path, help="of what is proven at a start (default: a new folder)")
    parser.add_argument("--without-head", action="store_true", help="time nothing but an engine without one")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    without = {} if asked.without_head else without_head(asked, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": asked.layers}))
    settings = Settings(
        model=str(folder), device=DeviceChoice.CUDA, load_format=LoadFormat.DUMMY,
        cache_dir=str(asked.cache_dir or folder / "cache"),
        max_model_len=1024, kv_cache_tokens=40_960, max_num_seqs=max(asked.rows), max_num_batched_tokens=1024,
        attestation_interval_s=0.0, choose_matmuls=False, on_unproven=Policy.QUALIFY, page_size=64, layer_check=False,
        speculative_tokens=None if asked.without_head else MOST,
    )  # fmt: skip
    sizes_of = startup.sizes_of_graphs

    def sizes(*given: object) -> GraphSizes:
        return replace(sizes_of(*given), row_tokens=tuple(range(2, 2 + MOST)))  # type: ignore[arg-type]

    if not asked.without_head:
        startup.sizes_of_graphs = sizes  # type: ignore[assignment]
    started_at = time.monotonic()
    built = startup.build_engine(settings, frozenset(), lambda _, __: None)
    print(f"built in {time.monotonic() - started_at:.1f} s", flush=True)
    engine, runner, first = built.engine, built.runner, built.engine.drafter
    engine.__class__ = Planted
    drafters: dict[int, Fewer | None] = {0: None}
    for most in () if first is None else range(1, 1 + MOST):  # each with graphs of its own
        assert isinstance(first, HeadDrafter)
        runner.max_drafted_tokens = most
        steps = HeadSteps(runner)
        steps.capture(CudaCapture(runner.worker.device, names_kernels=False), max(asked.rows), 1024)
        drafters[most] = Fewer(steps, first.pool, most_rows=10**6, row_tokens=1 + most)
    found, rng = [], random.Random(7)
    for num_rows in asked.rows:
        for most, drafter in drafters.items():
            runner.max_drafted_tokens, engine.drafter = most, drafter
            if drafter is not None:
                drafter.most = most
            row = {**timed_row(engine, num_rows, most, rng), "has_head": not asked.without_head}
            if num_rows in without:
                row["share"] = round(row["expected_ms"] / without[num_rows]["token_ms"], 4)
            found.append(row)
            print(row, flush=True)
            if asked.out is not None:
                asked.out.write_text(
                    json.dumps({"layers": asked.layers, "rows": [*without.values(), *found]}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
