"""The demo model on a CPU: tokens a second and the first token beside `transformers` `generate`, in rounds, in one run.

OMP_WAIT_POLICY=passive python trials/transformers_speed.py [--rounds 9] [--batch 8] [--input 64] [--output 128]

Both in fp32 on the same cores, greedy, the same token ids. Ours is measured over HTTP, streaming; transformers in
this process, without any server. While one computes the other is idle. Beside the ratio of the medians there is the
median of the rounds' own ratios: on a machine whose pace changes from minute to minute both sides of a round share it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from running_server import DEMO, ROOT, free_port, running

from qualification.common.quantiles import quantile_interval, ratio_interval
from qualification.load.client import LoadClient
from qualification.load.discovery import discover
from qualification.load.trace import Seed, at_once


@contextmanager
def our_server() -> Iterator[str]:
    """The URL of a server of the demo model, when it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--device", "cpu"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(command, port, Path(folder, "server.log"), os.environ) as server,
    ):
        server.wait_ready()
        yield server.url


def theirs(model: transformers.PreTrainedModel, prompts: list[list[int]], num_output: int) -> float:
    """Seconds of `generate` for all prompts together."""
    ids = torch.tensor(prompts)
    began = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
    )
    seconds = time.perf_counter() - began
    assert output.shape == (len(prompts), len(prompts[0]) + num_output)
    return seconds


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Samples by name: tokens a second of a batch, seconds to the first token of one prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    found: dict[str, list[float]] = {name: [] for name in ("our_rate", "their_rate", "our_first_s", "their_first_s")}
    with our_server() as url:
        client = LoadClient(discover(url)[0])
        for n in range(args.rounds + 1):
            batch, alone = (
                at_once(Seed(f"{n} {k}", "", 4000), num_requests=k, num_input=args.input, num_output=args.output)
                for k in (args.batch, 1)
            )
            their_s = theirs(model, [request.token_ids for request in batch], args.output)
            result = client.run(batch)
            their_first_s = theirs(model, [alone[0].token_ids], 1)
            first = client.run([*at_once(Seed(f"{n} 1", "", 4000), num_requests=1, num_input=args.input, num_output=2)])
            errors = [sample.error for sample in (*result.samples, *first.samples) if sample.error is not None]
            assert not errors, errors
            if n == 0:
                continue  # warm-up
            found["their_rate"].append(args.batch * args.output / their_s)
            found["our_rate"].append(sum(sample.num_tokens for sample in result.samples) / result.duration_s)
            found["their_first_s"].append(their_first_s)
            found["our_first_s"].append(first.samples[0].ttft_s or 0.0)
            print(f"round {n}: {found['our_rate'][-1]:.0f} against {found['their_rate'][-1]:.0f} tokens/s", flush=True)
        client.close()
    return found


def by_round(ours: list[float], theirs: list[float]) -> dict[str, object]:
    """The median of the rounds' ratios, and its 95% interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    interval = quantile_interval(ratios, 0.5)
    return {
        "median": round(statistics.median(ratios), 3),
        "interval_95": None if interval is None else [round(interval.lo, 3), round(interval.hi, 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 9), ("batch", 8), ("input", 64), ("output", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "cpu-transformers.json")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    found = measure(args)
    rate, first = (ratio_interval(found[f"our_{name}"], found[f"their_{name}"], 0.5) for name in ("rate", "first_s"))
    content = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(args, name) for name in ("rounds", "batch", "input", "output")},
        **{name: round(statistics.median(samples), 5) for name, samples in found.items()},
        "rate_ratio": round(statistics.median(found["our_rate"]) / statistics.median(found["their_rate"]), 3),
        "rate_ratio_95": None if rate is None else [round(rate.lo, 3), round(rate.hi, 3)],
        "first_ratio": round(statistics.median(found["our_first_s"]) / statistics.median(found["their_first_s"]), 3),
        "first_ratio_95": None if first is None else [round(first.lo, 3), round(first.hi, 3)],
        "rate_ratio_by_round": by_round(found["our_rate"], found["their_rate"]),
        "first_ratio_by_round": by_round(found["our_first_s"], found["their_first_s"]),
        "samples": {name: [round(value, 5) for value in samples] for name, samples in found.items()},
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in content.items() if "ratio" in name}))


if __name__ == "__main__":
    main()
