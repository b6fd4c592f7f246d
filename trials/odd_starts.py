"""Engines of odd models, each started with an empty cache on a CPU: none may be refused for a fault of the checker.

    python trials/odd_starts.py --out docs/benchmarks/odd-starts-cpu.json     # the time is in the file

The models are the 100 mixtures of trials/odd_mixtures.py, and 24 of odd numbers of heads, head dims, widths and words,
with random weights. Each measures every path that it needs under the default policy, and writes three tokens. What the
checker has to refuse is tried at the first start alone: it is the same for all, and took 40 of its 60 s.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from odd_mixtures import SMALL_CPU, odd_pairs

from kernels.system.device import read_fingerprint
from qualification.decision.decision import Policy
from qualification.measure.qualify import qualify
from server.engine.startup.builder import build_engine
from server.engine.startup.plan import Unservable
from server.errors import StartError
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, LoadFormat, Settings

NUM_NEW = 3
# query heads, KV heads, head dim, hidden size, intermediate size, words
GEOMETRIES = (
    (1, 1, 2, 1, 1, 2), (1, 1, 4, 3, 5, 3), (2, 1, 6, 7, 11, 13), (3, 1, 10, 31, 33, 37), (3, 3, 14, 17, 51, 101),
    (5, 1, 18, 65, 63, 257), (5, 5, 22, 29, 97, 509), (6, 2, 26, 127, 129, 1009),
    (7, 1, 34, 43, 77, 50), (7, 7, 8, 9, 9, 9),
    (9, 3, 50, 81, 85, 333), (11, 11, 12, 121, 13, 77), (12, 4, 66, 257, 255, 4097), (13, 1, 16, 15, 49, 31),
    (14, 2, 98, 100, 36, 99), (15, 5, 130, 45, 75, 60), (17, 17, 6, 19, 23, 29), (21, 7, 30, 61, 59, 53),
    (25, 5, 64, 1, 3, 5), (31, 1, 4, 33, 31, 97), (2, 2, 194, 47, 41, 71),
    (1, 1, 258, 67, 73, 79), (4, 2, 300, 83, 89, 91),
    (2, 1, 512, 103, 107, 109),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Start:
    """One start. `refused`: why it was, or empty."""

    model: str
    is_ready: bool
    statuses: dict[str, int]
    num_tokens: int
    refused: str
    seconds: float


def geometry(index: int) -> dict[str, object]:
    heads, kv_heads, head_dim, hidden, intermediate, words = GEOMETRIES[index]
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def mixture(num_experts: int, num_active: int) -> dict[str, object]:
    hidden, width = SMALL_CPU
    return {
        **geometry(0),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 97,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": num_experts,
        "num_experts_per_tok": num_active,
    }


def started(name: str, config: Mapping[str, object], folder: Path, *, tries_checker: bool) -> Start:
    """Build an engine and have it write; a refusal is a result."""
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        load_format=LoadFormat.DUMMY,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_tokens=256,
        page_size=8,
        cache_dir=str(folder / "cache"),
    )
    assert settings.on_unproven is Policy.QUALIFY
    measure = qualify if tries_checker else partial(qualify, check_checker=lambda *_, **__: ())
    started_at, statuses, num_tokens = time.monotonic(), dict[str, int](), 0
    try:
        built = build_engine(settings, frozenset(), lambda *_: None, run_qualification=measure)
    except (StartError, Unservable) as error:
        return Start(name, False, statuses, num_tokens, str(error)[:500], round(time.monotonic() - started_at, 2))
    for row in built.ready.plan:
        statuses[row.status] = statuses.get(row.status, 0) + 1
    built.engine.submit(Submit("a", [1] * 19, SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)))
    while built.engine.has_work:
        output = built.engine.step()
        num_tokens += sum(len(delta.token_ids) for delta in output.deltas) if output else 0
    return Start(name, True, statuses, num_tokens, "", round(time.monotonic() - started_at, 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most-pairs", type=int, help="only so many mixtures, of all sizes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # for tensors this small, threads wait for each other
    started_at, pairs = time.monotonic(), odd_pairs()
    chosen = pairs[:: -(-len(pairs) // args.most_pairs)] if args.most_pairs else pairs
    models = [
        (f"heads {row[0]}/{row[1]} dim {row[2]}, sizes {row[3:]}", geometry(n)) for n, row in enumerate(GEOMETRIES)
    ]
    models += [
        (f"experts {num_experts}/{num_active}", mixture(num_experts, num_active)) for num_experts, num_active in chosen
    ]
    found = []
    for name, config in models:
        with tempfile.TemporaryDirectory() as folder:
            start = started(name, config, Path(folder), tries_checker=not found)
        found.append(start)
        print(f"{len(found)} of {len(models)}: {start}", flush=True)
    failed = [start for start in found if not start.is_ready or start.num_tokens != NUM_NEW]
    result = {
        "command": "python trials/odd_starts.py",
        "machine": read_fingerprint(torch.device("cpu")).values(),
        "num_geometries": len(GEOMETRIES),
        "num_mixtures": len(chosen),
        "num_failed": len(failed),
        "seconds": round(time.monotonic() - started_at, 1),
        "starts": [asdict(start) for start in found],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(found) - len(failed)} of {len(found)} models started and wrote: {args.out}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
