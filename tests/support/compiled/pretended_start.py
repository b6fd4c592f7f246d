"""Starts an engine on a pretended H200, and then has it compute steps as in service.

python pretended_start.py PRESET LAYERS SETTINGS FOLDER

Prints as JSON the entries of Triton's cache that the start asked for ("at_start"), those that the steps asked for
beside them ("in_service"), those that a rehearsal of the same plan finds ("rehearsed"), those that the cache lacks
("missing"), what was logged ("said"), and the progress.
"""

import io
import json
import logging
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from triton import knobs

import server.model.demo
from kernels.system.child_process import python_command
from qualification.compiling.pretended_gpu import H200, PretendedTensors, pretend
from qualification.compiling.processes import Found
from qualification.compiling.wanted import WantedKernels, entry_of
from qualification.decision.decision import Policy
from qualification.decision.presets import preset_named
from server.engine.execution.followers import decisions_of
from server.engine.execution.runner import ModelRunner
from server.engine.startup import builder
from server.engine.startup.ahead import PROGRAM, Order
from server.engine.startup.rehearsal import RehearsedCapture
from server.engine.startup.warmup import probes_of, synthetic_batch
from server.protocol.messages import SamplingParams
from server.settings import LoadFormat, Settings

DEMO = Path(server.model.demo.__file__).parent
SAMPLINGS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=0.7, top_k=20),
    SamplingParams(max_tokens=1, top_p=0.9, presence_penalty=0.5, logprobs=3),
)
NUM_BATCHES, MOST_TOKENS = 40, 8192


def write_model(folder: Path, config: dict[str, object], num_layers: int) -> None:
    """Write a config.json of its first layers, and the demo's tokenizer."""
    folder.mkdir(exist_ok=True)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := config.get(name), list):
            config[name] = kinds[:num_layers]
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def serve(runner: ModelRunner, max_len: int, rng: random.Random) -> None:
    """Compute the batches that an attestation looks at; then prompts, chunks and single tokens of random lengths."""
    size = runner.worker.kv.page_size
    for batch in probes_of(runner.dispatcher.decisions, page=runner.num_pages, page_size=size, max_len=max_len):
        runner.launch(batch).result()
    for _ in range(NUM_BATCHES):
        kind, num_rows = rng.randrange(3), rng.choice((1, 2, 3, 7, 32))
        contexts = [rng.randint(3, max_len) for _ in range(num_rows)]
        queries = [1 if kind == 0 else it if kind == 1 else rng.randint(2, it - 1) for it in contexts]
        if sum(queries) <= MOST_TOKENS:
            rows = [*zip(queries, contexts, strict=True)]
            runner.launch(synthetic_batch(rows, size, rng.choice(SAMPLINGS))).result()


def rehearsed(settings: Settings, runner: ModelRunner) -> list[str]:
    """Return what the program finds, in a process of its own and without workers."""
    order = Order(settings, decisions_of(runner.dispatcher), msgspec.to_builtins(H200))
    ran = subprocess.run(python_command(PROGRAM), input=msgspec.json.encode(order), stdout=subprocess.PIPE, check=True)
    found = msgspec.json.decode(ran.stdout, type=Found)
    return [*found.calls, *found.known]


def settings_on_paper(folder: str, changes: Mapping[str, object]) -> Settings:
    """Pretend an H200, and stand in for what reads results and for the driver; return the settings of a start there."""
    pretend(H200)
    builder.CudaCapture = partial(RehearsedCapture, launches=True)  # type: ignore[assignment, misc]
    builder.attestor_of = builder.shadow_check_of = lambda *_: None  # type: ignore[assignment, return-value]
    given = {
        "model": f"{folder}/model",
        "cache_dir": f"{folder}/cache",
        "load_format": LoadFormat.DUMMY.value,
        "on_unproven": Policy.DEGRADE.value,
        "compile_jobs": 0,
        "choose_matmuls": False,
        "attestation_interval_s": 0.0,
        "shadow_budget": 0.0,
    }
    return msgspec.convert({**given, **changes}, Settings)


def main() -> None:
    preset, num_layers, changes, folder = sys.argv[1:]
    log, progress = io.StringIO(), list[str]()
    logging.basicConfig(level=logging.INFO, stream=log)
    write_model(Path(folder, "model"), dict(preset_named(preset).config), int(num_layers))
    settings = settings_on_paper(folder, json.loads(changes))
    wanted = WantedKernels()
    with wanted, PretendedTensors():
        built = builder.build_engine(settings, frozenset(), lambda _, detail: progress.append(detail))
        num_at_start = len(wanted.by_key)
        serve(built.runner, built.ready.max_model_len, random.Random(5))
    entries = [entry_of(key, compile_fn) for key, compile_fn in wanted.by_key.items()]
    found = {
        "at_start": entries[:num_at_start],
        "in_service": entries[num_at_start:],
        "rehearsed": rehearsed(settings, built.runner),
        "missing": [it for it in entries if not (Path(knobs.cache.dir) / it).is_file()],
        "said": log.getvalue(),
        "progress": progress,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
