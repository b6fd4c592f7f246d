"""The measurements of `hallmark bench steps`, and their order."""

from dataclasses import dataclass, replace
from enum import Enum

from qualification.measure.costs.ceilings import Ceilings
from qualification.model.config import ModelConfig
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.limits import EngineLimits


@dataclass(frozen=True, slots=True)
class StepsPlan:
    """Tokens, sequences and seconds."""

    shortest: int
    batches: tuple[int, ...]
    batch_context: int  # of the sweep over batches
    contexts: tuple[int, ...]
    context_batch: int  # of the sweep over contexts
    streams: int  # of the load
    load_prompt: int
    load_output: int
    steps: int  # samples of a decode cell, at most
    least_steps: int
    budget_s: float  # of sampling a cell, above the least samples


CUDA_PLAN = StepsPlan(
    shortest=16,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    batch_context=1024,
    contexts=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    context_batch=8,
    streams=64,
    load_prompt=512,
    load_output=64,
    steps=48,
    least_steps=12,
    budget_s=1.0,
)
# Two cores make a few thousand prompt tokens a second of the demo model, and a decode step of 256 takes them a second.
CPU_PLAN = replace(
    CUDA_PLAN, batch_context=64, context_batch=1, streams=8, load_prompt=64, load_output=16, steps=32, least_steps=6
)
QUICK_PLAN = replace(
    CPU_PLAN, batches=(1, 4, 16), batch_context=32, contexts=(64, 128), streams=2, load_output=4, steps=6, budget_s=0.1
)


@dataclass(frozen=True, slots=True)
class StepsBench:
    """A built engine and all that is known of it."""

    built: BuiltEngine
    config: ModelConfig
    limits: EngineLimits
    ceilings: Ceilings | None
    plan: StepsPlan
    is_cuda: bool


class Kind(Enum):
    PROMPT = "prompt"
    BATCH = "batch"
    CONTEXT = "context"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Cell:
    """Something to measure."""

    kind: Kind
    batch: int
    tokens: int  # of each prompt or context
    cost: float  # about how long it takes, in tokens of short prompts

    def __str__(self) -> str:
        if self.kind is Kind.PROMPT:
            return f"a prompt of {self.tokens}"
        what = "load" if self.kind is Kind.LOAD else "decode"
        return f"{what} of {self.batch} x {self.tokens}"


def cells_of(bench: StepsBench) -> tuple[list[Cell], list[str]]:
    """Cells by their cost, so that those for which no time is left are few; and what does not fit, with the reason."""
    plan, longest = bench.plan, bench.built.engine.max_len
    lengths = [n for n in (plan.shortest << k for k in range(32)) if n < longest]
    # A prompt of the whole context has no room for its first token.
    lengths += [longest - 1] if longest - 1 > lengths[-1] * 1.5 else []
    cells = [_cell(plan, Kind.PROMPT, 1, n) for n in lengths]
    cells += [_cell(plan, Kind.LOAD, plan.streams, plan.load_prompt)]
    cells += [_cell(plan, Kind.BATCH, batch, plan.batch_context) for batch in plan.batches]
    contexts = [context for context in plan.contexts if context <= longest]
    cells += [_cell(plan, Kind.CONTEXT, plan.context_batch, context) for context in contexts]
    refusals = {cell: _refusal(bench, cell) for cell in cells}
    fitting = [cell for cell, refusal in refusals.items() if refusal is None]
    skipped = [f"{cell}: {refusal}" for cell, refusal in refusals.items() if refusal is not None]
    return sorted(fitting, key=lambda cell: cell.cost), skipped


def _cell(plan: StepsPlan, kind: Kind, batch: int, tokens: int) -> Cell:
    prompts = 3 if kind in {Kind.PROMPT, Kind.LOAD} else 1
    num_tokens = batch * (prompts * tokens * (1 + tokens / 8192) + (0 if kind is Kind.PROMPT else 2 * plan.steps))
    return Cell(kind, batch, tokens, 500 + num_tokens)


def _refusal(bench: StepsBench, cell: Cell) -> str | None:
    if cell.kind is Kind.PROMPT:
        return None
    if cell.batch > bench.limits.max_num_seqs:
        return f"max_num_seqs is {bench.limits.max_num_seqs}"
    plan, is_load = bench.plan, cell.kind is Kind.LOAD
    needed = cell.tokens + plan.load_output if is_load else max(cell.tokens, 4 * plan.steps)
    if needed > bench.built.engine.max_len:
        return f"a sequence takes {bench.built.engine.max_len} tokens"
    page_size = bench.limits.page_size
    room = bench.built.runner.num_pages * page_size
    # The scheduler keeps a hundredth of the pages free when it admits a sequence.
    is_fitting = cell.batch * (cell.tokens + (plan.load_output if is_load else plan.steps) + page_size) <= 0.98 * room
    return None if is_fitting else f"the KV cache holds {room} tokens"
