"""`hallmark bench`: the commands of all benches. No torch."""

import argparse
from collections.abc import Mapping

from bench.attention import command as attention_command
from bench.serve import command as serve_command
from bench.steps import command as steps_command
from qualification.common.flags import add_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a command for each bench."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT", title="benches")
    attention_command.add_arguments(
        add_command(
            benches,
            "attention",
            "beside FA2, FA3, cuDNN and FlexAttention",
            "Time every attention path that can run here beside its peers. Every combination of the sweep's flags is "
            "a case; results are a table, one JSON file and charts.",
            "hallmark bench attention --quick",
            "hallmark bench attention --phases prefill --lengths 2048 8192 --out-dir results",
        )
    )
    serve_command.add_arguments(
        add_command(
            benches,
            "serve",
            "load on any OpenAI-compatible server, beside others",
            "Put the same load on one or more OpenAI-compatible servers, in turns, and compare times to the first "
            "token, times per token and tokens a second.",
            "hallmark bench serve --url http://127.0.0.1:8000 --quick",
            "hallmark bench serve --url http://127.0.0.1:8000 --peer vllm=http://127.0.0.1:8001 --out-dir results",
        )
    )
    steps_command.add_arguments(
        add_command(
            benches,
            "steps",
            "the engine's own, by length, batch and context",
            "Time single steps of the engine, without HTTP: prompts by length, decode by batch and by context.",
            "hallmark bench steps --quick",
            "hallmark bench steps --model ~/models/Qwen3-8B --dummy --out results",
        )
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the bench that was chosen and return its exit code."""
    if args.bench == "serve":
        return serve_command.run(args)
    return steps_command.run(args, environ) if args.bench == "steps" else attention_command.run(args)
