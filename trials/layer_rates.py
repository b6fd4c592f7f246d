"""Both error rates of the check of the layers, on small random models: right ones that fail, wrong ones that pass.

    python trials/layer_rates.py --seconds 600 --out docs/benchmarks/layer-rates.json

Sizes, weights and dtypes are drawn by the seed, with columns a hundred times the others and weights that saturate
softmax. Each layer of a right model is one check; each wrong model has one planted fault. Attention is served by the
first path that may, products by PyTorch. Needs torch and safetensors, and runs on a CPU or on a GPU.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.catalog import PATHS, paths_on
from kernels.system.device import read_fingerprint
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.shape import AttentionShape, Dtype
from qualification.decision.decision import Decision, Pairs, Status
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from qualification.model.config import ModelConfig
from qualification.model.families.reader import read_model
from qualification.model.families.registry import family_named
from qualification.model.forward.model import ForwardReference
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.step_writer import StepWriter
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.observation import Observation
from server.engine.proof.layer_check import LayerCheck, LayersChecked
from server.engine.proof.layer_steps import LayerSteps
from server.engine.scheduling.sequence import Batch
from server.model.decoder import Decoder, LayerObserver
from server.model.empty_weights import empty_weights
from server.model.kv_cache import KVCache
from server.model.layers import Weights
from server.model.step import Step
from server.model.tensor_views import checkpoint_views

PAGE_SIZE, NUM_PAGES, MAX_LEN, VOCABULARY = 16, 32, 256, 97
DTYPES = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 9, "sliding_window_pattern": 2},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6},
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2
    },
}  # fmt: skip
_OUTLIER = 100.0  # times the other columns


class NextPosition(Decoder):
    """Rotates by position + 1."""

    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        return super().forward(replace(step, positions=step.positions + 1), observer)


def _changed(**changes: Any) -> Callable[[Decoder], Decoder]:
    return lambda it: Decoder(replace(it.config, **changes), it.weights)


def _neighbour(decoder: Decoder) -> Decoder:
    *others, first, second = decoder.weights.layers  # the first layers may be of another kind
    return Decoder(decoder.config, replace(decoder.weights, layers=(*others, second, first)))


def _shifted_rows(decoder: Decoder) -> Decoder:
    return Decoder(decoder.config, replace(decoder.weights, embedding=decoder.weights.embedding.roll(1, 0)))


FAULTS: Mapping[str, Callable[[Decoder], Decoder]] = {
    "position + 1": lambda it: NextPosition(it.config, it.weights),
    "residual x 1.05": lambda it: Decoder(
        replace(it.config, residual_scale=it.config.residual_scale * 1.05), it.weights
    ),
    "two layers swapped": _neighbour,
    "embedding off by a row": _shifted_rows,
    "epsilon of a norm 0.1": _changed(norm_eps=0.1),
}


class Served:
    """A decoder over a cache, by the paths of the catalog."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, fingerprint: Fingerprint) -> None:
        device, config = decoder.weights.embedding.device, decoder.config
        limits = ServingLimits(MAX_LEN, MAX_LEN, PAGE_SIZE, DTYPES[dtype], DTYPES[dtype])
        decisions = {
            shape: _decide(shape, fingerprint, device) for shape in shapes_needed(signature_of(config), limits)
        }

        def redecide(shape: AttentionShape, _: Pairs, __: Pairs) -> Decision[AttentionShape]:
            return decisions[shape]

        flags = tuple(AttentionFlags(it.scale, window=it.window, softcap=it.softcap) for it in config.attentions)
        kv = KVCache.allocate(config, NUM_PAGES, PAGE_SIZE, dtype, device)
        dispatcher = Dispatcher(decisions, PATHS, flags, redecide=redecide)
        self.worker = Worker(decoder, kv, dispatcher, SampledTokens(16, device))
        self._writer = StepWriter(
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            is_pinned=device.type == "cuda",
            num_slots=None,
            token_arrays=self.worker.token_arrays,
        )

    def observe(self, batch: Batch) -> tuple[Tensor, Observation]:
        """Run a batch kernel by kernel."""
        observation = self.worker.observation()
        hidden = self.worker.launch(self._writer.write(batch, {}), observation=observation)
        self.worker.drop_unread()
        return hidden, observation


def _decide(shape: AttentionShape, fingerprint: Fingerprint, device: torch.device) -> Decision[AttentionShape]:
    paths = (it for it in paths_on(device) if it.serves(shape) and not it.rejects(shape, fingerprint))
    path = next(paths).name
    return Decision(shape, path, Status.PROVEN, path, (), (), None)


def drawn_config(rng: Random) -> ModelConfig:
    """Return a model of a drawn family and drawn sizes."""
    family = rng.choice(list(FAMILIES))
    heads = rng.choice((2, 4))
    values = {
        "model_type": family, "vocab_size": VOCABULARY, "hidden_size": rng.choice((32, 48, 80)),
        "intermediate_size": rng.choice((48, 72)), "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2)), "head_dim": 16, "max_position_embeddings": MAX_LEN,
        "bos_token_id": 1, "eos_token_id": 2, "rope_theta": rng.choice((500.0, 1e4, 1e6)),
    }  # fmt: skip
    return read_model({**values, **FAMILIES[family]})


def drawn_weights(config: ModelConfig, rng: Random, folder: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    """Fill weights by the seed, and write them as the family's checkpoint has them."""
    names = family_named(config.family, "a drawn model").tensors
    assert names is not None
    weights, generator = empty_weights(config, dtype, device), torch.Generator(device).manual_seed(rng.randrange(2**31))
    std, has_outlier = rng.choice((0.02, 0.1, 0.3)), rng.random() < 0.5
    tensors = {}
    for name, stored in checkpoint_views(weights, config, names).items():
        it = stored.values
        if name.endswith(("norm.weight", "bias")):
            it.uniform_(0.5, 1.5, generator=generator)
        else:
            it.normal_(0, std, generator=generator)
        if has_outlier and name.endswith("embed_tokens.weight"):
            it[:, 3] *= _OUTLIER
        tensors[name] = it.contiguous().clone()
    save_file(tensors, folder / "model.safetensors")
    return weights


def check(
    decoder: Decoder, config: ModelConfig, folder: Path, dtype: torch.dtype, machine: Fingerprint
) -> LayersChecked:
    """Hold a decoder to the files of a folder."""
    device = decoder.weights.embedding.device
    served, reference = Served(decoder, dtype, machine), ForwardReference(folder, config, dtype, device)
    steps = LayerSteps(
        vocab_size=VOCABULARY, page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_len=MAX_LEN, max_tokens=MAX_LEN,
        max_rows=16,
    ).all()  # fmt: skip
    try:
        return LayerCheck(served, reference, served.worker.logits, kv_dtype=dtype).run(steps)
    finally:
        reference.close()


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument("--seconds", type=float, default=600)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given.add_argument("--out", type=Path)
    options = given.parse_args()
    torch.set_num_threads(1)
    rng, device = Random(options.seed), torch.device(options.device)
    machine, started_at = read_fingerprint(device), time.monotonic()
    found: dict[str, Any] = {
        "device": machine.gpu,
        "torch": machine.torch,
        "seed": options.seed,
        "right": {},
        "faults": {},
    }
    counts, largest, alarms = Counter[str](), dict[str, float](), list[str]()
    least, trials, missed = dict[str, float](), Counter[str](), Counter[str]()
    while time.monotonic() - started_at < options.seconds:
        config, dtype = drawn_config(rng), rng.choice(list(DTYPES))
        name = DTYPES[dtype].value
        with TemporaryDirectory() as folder, torch.inference_mode():
            weights = drawn_weights(config, rng, Path(folder), dtype, device)
            right = Decoder(config, weights)
            result = check(right, config, Path(folder), dtype, machine)
            counts[name] += result.num_layers
            largest[name] = max(largest.get(name, 0.0), result.largest.factor)
            if result.first is not None:
                alarms.append(f"{config.family} {name}: {result.first}")
            if rng.random() < 0.2:
                fault = rng.choice(list(FAULTS))
                wrong = check(FAULTS[fault](right), config, Path(folder), dtype, machine)
                trials[fault] += 1
                missed[fault] += wrong.first is None
                least[fault] = min(least.get(fault, 1e9), wrong.largest.factor)
    found["right"] = {it: {"checks": counts[it], "largest share": round(largest[it], 4)} for it in sorted(counts)}
    found["right failed"] = alarms
    found["faults"] = {
        it: {"trials": trials[it], "missed": missed[it], "least of the limit": round(least[it], 2)}
        for it in sorted(trials)
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
