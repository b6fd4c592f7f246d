"""Send a demo server what schemathesis makes of its own /openapi.json, and write down what came back.

python trials/schema_cases.py SCHEMATHESIS --cases 20000 --out docs/benchmarks/schema-cases.json
python trials/schema_cases.py SCHEMATHESIS --task embed --cases 2000 --paths /v1/embeddings --share 1000 --out FILE

Runs of other seeds follow one another until there are enough cases. A run may draw few bodies of a large schema, so the
drawn cases of some routes are counted, and runs of such a route alone follow until it has its share. Before a run the
server stores responses; half of the ids and names that are drawn are theirs and the model's. The exit status is 1 for
an answer of 5xx, for a status, media type, header or body that the document does not have, and for an engine that is
another process at the end. Some 0.1 s of a core a case.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx2
from running_server import ROOT, free_port, running

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/responses/{response_id}/input_items", "/v1/models", "/v1/models/{name}"),
)
NUM_STORED = 30  # responses that are stored before a run; it deletes some
SIDE_BY_SIDE = 4  # runs of one route, each of a seed: alone, one sends its requests one after another


def run_once(
    program: str, url: str, seed: int, num_examples: int, path: str | None = None
) -> tuple[Counter[tuple[str, str]], Counter[str], list[str]]:
    """One run; returns its cases by operation and status, the drawn ones by operation, and its failures as printed.

    path  the only one that gets requests, all of them drawn
    """
    command = [program, "--no-color", "run", f"{url}/openapi.json", "--seed", str(seed), "-n", str(num_examples)]
    command += ["--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--workers", "8"]
    command += ["--request-timeout", "120", "--checks", ",".join(CHECKS)]
    if path is not None:
        command += ["--include-path", path, "--phases", "fuzzing"]
    with tempfile.TemporaryDirectory() as folder:  # for what it keeps where it is started
        (Path(folder) / "schemathesis.toml").write_text(configuration(url))
        command += ["--report", "ndjson", "--report-ndjson-path", f"{folder}/cases"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        cases, drawn = cases_of(Path(folder) / "cases")
    if not cases:
        raise RuntimeError(f"schemathesis ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    failures = done.stdout.partition(" FAILURES ")[2].partition(" SUMMARY ")[0]
    titles = re.findall(r"^_+ ([A-Z]+ /\S*) _+$|^- (ST\d+ .*)$", failures, re.MULTILINE)
    print(f"seed {seed}: {cases.total()} cases, {len(titles)} lines of failures", flush=True)
    return cases, drawn, [operation or title for operation, title in titles]


def configuration(url: str) -> str:
    """Return a schemathesis.toml by which half of the ids and names that it draws exist on the server."""
    with httpx2.Client(base_url=url, timeout=60) as client:
        names = {"name": [it["id"] for it in client.get("/v1/models").raise_for_status().json()["data"]]}
        if "/v1/responses" in client.get("/openapi.json").raise_for_status().json()["paths"]:
            body = {"input": "a", "max_output_tokens": 1, "store": True}
            stored = [client.post("/v1/responses", json=body).raise_for_status() for _ in range(NUM_STORED)]
            names["response_id"] = [it.json()["id"] for it in stored]
    dictionaries = "".join(f"[dictionaries.{name}]\nvalues = {json.dumps(it)}\n" for name, it in names.items())
    bindings = (f'"path.{name}" = {{ dictionary = "{name}", probability = 0.5 }}\n' for name in names)
    return dictionaries + "[parameters]\n" + "".join(bindings)


def cases_of(report: Path) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Count the requests of a run's report by operation and status (`none`: no answer), and the drawn by operation."""
    cases: Counter[tuple[str, str]] = Counter()
    drawn: Counter[str] = Counter()
    for line in report.read_text().splitlines() if report.exists() else ():
        scenario = json.loads(line).get("ScenarioFinished", {})
        recorder = scenario.get("recorder", {})
        for it in recorder.get("interactions", {}).values():
            response = it.get("response")
            cases[recorder["label"], "none" if response is None else str(response["status_code"])] += 1
            drawn[recorder["label"]] += scenario["phase"] == "fuzzing"
    return cases, drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="schemathesis, of an environment of its own")
    parser.add_argument("--task", choices=["generate", "embed", "score"], default="generate", help="of the server")
    parser.add_argument("--model", type=Path, help="its folder; the demo's without")
    # Room for the 32 tokens of an example; an answer that fills the context is short.
    parser.add_argument("--max-model-len", default="64", help="of the server; a reranker's prompt needs some 1,000")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--examples", type=int, default=400, help="of each operation in a run, beside those of bounds")
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--share", type=int, default=3000, help="drawn cases that each of --paths has at least")
    parser.add_argument("--paths", nargs="*", default=PATHS, help="routes that have a share")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    port, seed = free_port(), args.seed
    failures: list[str] = []
    cases: Counter[tuple[str, str]] = Counter()
    drawn: Counter[str] = Counter()
    flags = ["--port", str(port), "--max-model-len", args.max_model_len, "--task", args.task]
    flags += [] if args.model is None else ["--model", str(args.model)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running([sys.executable, "-m", "server.cli", "serve", *flags], port, log, environment) as server:
            server.wait_ready()
            engine = server.engine_pid()
            while cases.total() < args.cases:
                more, more_drawn, found = run_once(args.program, server.url, seed, args.examples)
                cases, drawn, failures, seed = cases + more, drawn + more_drawn, failures + found, seed + 1
            for path in args.paths:
                run = partial(run_once, args.program, server.url, num_examples=args.examples, path=path)
                while sum(num for it, num in drawn.items() if it.endswith(f" {path}")) < args.share:
                    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                        for more, more_drawn, found in pool.map(run, range(seed, seed + SIDE_BY_SIDE)):
                            cases, drawn, failures = cases + more, drawn + more_drawn, failures + found
                    seed += SIDE_BY_SIDE
            is_same = server.engine_pid() == engine and server.status_of("/readyz") == 200
    statuses: Counter[str] = Counter()
    by_operation: dict[str, dict[str, int]] = {}
    for (operation, status), num in sorted(cases.items()):
        statuses[status] += num
        by_operation.setdefault(operation, {})[status] = num
    version = subprocess.run([args.program, "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    result = {
        "command": " ".join(["python", "trials/schema_cases.py", *sys.argv[1:]]),
        "task": args.task,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "schemathesis": version,
        "checks": CHECKS,
        "seeds": [args.seed, seed - 1],
        "cases": cases.total(),
        "statuses": dict(sorted(statuses.items())),
        "statuses_by_operation": by_operation,
        "drawn_by_operation": dict(sorted(drawn.items())),
        "failures": failures,
        "engine_is_the_same_process": is_same,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if is_same and not failures and not any(it.startswith("5") or it == "none" for it in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
