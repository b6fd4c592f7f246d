"""Decisions for paths that a late device runs in another thread, by graphs or eagerly, and sizes of such engines."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from kernels.calls.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Dtype
from qualification.decision.model_shapes import ServingLimits, attention_shapes_needed
from server.engine.execution.graph_keys import GraphSizes, row_sizes
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.dispatch_key import Heads
from server.model.decoder import Decoder
from support.engine import closure_graphs
from support.engine.closure_graphs import PATH, decide, redecide

CPU = torch.device("cpu")
PAGE_SIZE = 8
MAX_LEN = 150  # two buckets of contexts
MAX_SEQS = 6
MAX_STEP = 32  # tokens
SIZES = GraphSizes((Bucket.LE_512,), row_sizes(MAX_SEQS), (16, 32), (4,), (16, 32), num_prompts=2)


def attend(*args: Any) -> None:
    """Run the path in another thread: torch makes no tensor of a subclass, as its biases are, within a mode."""
    run = path_named("sdpa.cpu").run
    assert run is not None
    APART.submit(torch.inference_mode()(run), *args).result()


APART = ThreadPoolExecutor(1)


GRAPHED, EAGER = (replace(it, run=attend) for it in (PATH, closure_graphs.EAGER))


def dispatcher_of(decoder: Decoder, path: str, *, page_size: int = PAGE_SIZE, most_drafted: int = 0) -> Dispatcher:
    limits = ServingLimits(MAX_LEN, MAX_STEP, page_size, Dtype.FP32, Dtype.FP32, max_drafted_tokens=most_drafted)
    decisions = {shape: decide(shape, path) for shape in attention_shapes_needed(decoder.config, limits)}
    flags = tuple(AttentionFlags(it.scale, window=it.window) for it in decoder.config.attentions)
    heads = tuple(map(Heads.of, decoder.config.attentions))
    layers = decoder.config.attention_layers
    return Dispatcher(decisions, (GRAPHED, EAGER), flags, redecide=redecide, layers=layers, heads=heads)
