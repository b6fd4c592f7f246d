"""A small model in an engine on a CPU, whose layers are checked; its decoder can be another one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.system.device import torch_dtype
from qualification.decision.decision import Policy
from qualification.model.forward.model import ForwardReference
from server.engine.execution.runner import ModelRunner
from server.engine.proof.layer_check import LayerCheck, LayersChecked
from server.engine.proof.layer_steps import LayerSteps
from server.engine.startup.subject import Subject, read_subject
from server.model.decoder import Decoder
from server.model.load.load import load_config, load_decoder
from server.settings import DeviceChoice, DtypeChoice, LoadFormat, Settings
from support.engine.attested import proving
from support.engine.built_engine import built_engine

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class CheckedLayers:
    """An engine of a model, and what its layers are held to."""

    subject: Subject
    runner: ModelRunner

    @classmethod
    def made(cls, folder: Path, cache: Path, dtype: DtypeChoice = DtypeChoice.FP32) -> "CheckedLayers":
        settings = Settings(
            model=str(folder),
            device=DeviceChoice.CPU,
            dtype=dtype,
            on_unproven=Policy.QUALIFY,
            max_model_len=128,
            kv_cache_tokens=2048,
            max_num_seqs=8,
            cache_dir=str(cache),
            attestation_interval_s=0,
            layer_check=False,
        )
        return cls(read_subject(settings), built_engine(settings, proving).runner)

    def check(self, decoder: Decoder | None = None, folder: Path | None = None) -> LayersChecked:
        """Hold `decoder`, or the engine's own, to the tensors of `folder`, or of the model's."""
        subject, runner, own = self.subject, self.runner, self.runner.worker.decoder
        limits = subject.limits
        steps = LayerSteps(
            vocab_size=subject.model.vocab_size,
            page_size=limits.page_size,
            num_pages=runner.num_pages,
            max_len=limits.max_model_len,
            max_tokens=limits.max_num_batched_tokens,
            max_rows=limits.max_num_seqs,
        ).all()
        reference = ForwardReference(
            subject.folder if folder is None else folder,
            subject.model if folder is None else load_config(folder),
            torch_dtype(limits.dtype),
            subject.device,
            context=limits.max_model_len,
        )
        try:
            runner.worker.decoder = own if decoder is None else decoder
            logits = runner.worker.logits
            return LayerCheck(runner, reference, logits, kv_dtype=torch_dtype(limits.kv_dtype)).run(steps)
        finally:
            runner.worker.decoder = own
            reference.close()

    def decoder_of(self, folder: Path) -> Decoder:
        """Return the decoder of other files."""
        dtype = torch_dtype(self.subject.limits.dtype)
        return load_decoder(folder, load_config(folder), dtype=dtype, device=torch.device("cpu"), load_format=AUTO)


AUTO = LoadFormat.AUTO


def edited(
    folder: Path,
    into: Path,
    config: dict[str, object] | None = None,
    change: Callable[[Tensors], Tensors] | None = None,
) -> Path:
    """Copy a model, with other values in its config.json and other tensors."""
    shutil.copytree(folder, into)
    values = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**values, **(config or {})}))
    if change is not None:
        tensors = {name: tensor.contiguous() for name, tensor in change(load_file(into / "model.safetensors")).items()}
        save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into
