"""A small model on a CPU whose layers are checked; its decoder can be another one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.catalog import PATHS
from kernels.system.device import torch_dtype
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.shape import AttentionShape
from qualification.decision.decision import Decision, Pairs, Status
from qualification.decision.model_shapes import attention_shapes_needed
from qualification.model.forward.model import ForwardReference
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.step_writer import StepWriter
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.dispatch_key import Heads
from server.engine.operators.observation import Observation
from server.engine.proof.layer_check import LayerCheck, LayersChecked
from server.engine.proof.layer_steps import NUM_SLOTS, LayerSteps
from server.engine.scheduling.sequence import Batch
from server.engine.startup.subject import Subject, kv_cache_of, read_subject
from server.model.decoder import Decoder
from server.model.layer_state import StateCache
from server.model.load.load import load_config, load_decoder
from server.settings import CacheDtype, DeviceChoice, DtypeChoice, LoadFormat, Quantization, Settings

Tensors = dict[str, Tensor]
NUM_PAGES = 64


class ServedLayers:
    """A decoder over a cache, by the first paths of the catalog: an engine without plan, scheduler and graphs."""

    def __init__(self, subject: Subject, decoder: Decoder) -> None:
        limits, config = subject.limits, subject.config
        paths = [it for it in PATHS if Device.CPU in it.limits.devices]
        decisions = {}
        for shape in attention_shapes_needed(config, limits.serving):
            path = next(it for it in paths if not it.rejects(shape, subject.fingerprint)).name
            decisions[shape] = Decision(shape, path, Status.PROVEN, path, (), (), None)

        def redecide(shape: AttentionShape, _: Pairs, __: Pairs) -> Decision[AttentionShape]:
            return decisions[shape]

        flags, layers = [], [decoder.weights.layers[index] for index in config.attention_layers]
        for attention, layer in zip(config.attentions, layers, strict=True):
            flags.append(
                AttentionFlags(attention.scale, window=attention.window, softcap=attention.softcap, sinks=layer.sinks)
            )
        heads = tuple(map(Heads.of, config.attentions))
        dispatcher = Dispatcher(
            decisions,
            PATHS,
            tuple(flags),
            redecide=redecide,
            heads=heads,
            layers=config.attention_layers,
            chunks=config.chunks,
        )
        kv = kv_cache_of(subject, NUM_PAGES)
        states = StateCache.allocate(config, NUM_SLOTS, torch_dtype(limits.dtype), subject.device)
        self.worker = Worker(decoder, kv, dispatcher, SampledTokens(8, subject.device), states=states)
        arrays = self.worker.token_arrays
        size = limits.page_size
        self._writer = StepWriter(
            page_size=size,
            num_pages=NUM_PAGES,
            is_pinned=False,
            num_slots=None if states is None else NUM_SLOTS,
            token_arrays=arrays,
            window=min((it.window for it in config.attentions if it.window is not None), default=None),
        )

    def observe(self, batch: Batch) -> tuple[Tensor, Observation]:
        """Run a batch kernel by kernel."""
        observation = self.worker.observation()
        hidden = self.worker.launch(self._writer.write(batch, {}), observation=observation)
        self.worker.drop_unread()
        return hidden, observation


@dataclass(frozen=True)
class CheckedLayers:
    """A model, and what its layers are held to."""

    subject: Subject
    runner: ServedLayers

    @classmethod
    def made(
        cls, folder: Path, dtype: DtypeChoice = DtypeChoice.FP32, quantization: Quantization = Quantization.AUTO,
        *, kv_cache_dtype: CacheDtype = CacheDtype.AUTO,
    ) -> "CheckedLayers":  # fmt: skip
        settings = Settings(model=str(folder), device=DeviceChoice.CPU, dtype=dtype, max_model_len=128, max_num_seqs=8)
        settings = msgspec.structs.replace(settings, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        subject = read_subject(settings)
        torch.set_num_threads(1)  # for tensors this small threads wait for each other
        decoder = load_decoder(
            folder,
            subject.config,
            dtype=torch_dtype(subject.limits.dtype),
            device=subject.device,
            load_format=LoadFormat.AUTO,
        )
        return cls(subject, ServedLayers(subject, decoder))

    def check(self, decoder: Decoder | None = None, folder: Path | None = None) -> LayersChecked:
        """Hold `decoder`, or the engine's own, to the tensors of `folder`, or of the model's."""
        subject, runner, own = self.subject, self.runner, self.runner.worker.decoder
        limits = subject.limits
        steps = LayerSteps(
            vocab_size=subject.model.vocab_size,
            page_size=limits.page_size,
            num_pages=NUM_PAGES,
            max_len=limits.max_model_len,
            max_tokens=limits.max_num_batched_tokens,
            max_rows=limits.max_num_seqs,
            num_slots=None if runner.worker.states is None else NUM_SLOTS,
            chunk=subject.model.chunk,
            has_spans=subject.model.has_image_spans,
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
        return load_decoder(
            folder, load_config(folder), dtype=dtype, device=self.subject.device, load_format=LoadFormat.AUTO
        )


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
