"""How the next token of a sequence is chosen, in the sampler's words."""

from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import RowSampling
from server.engine.scheduling.sequence import Sequence


def is_plain_greedy(seq: Sequence) -> bool:
    """Whether the next token is simply the likeliest one."""
    return seq.is_greedy and (not seq.sampling.min_tokens or seq.num_generated >= seq.sampling.min_tokens)


def row_sampling(seq: Sequence, position: int) -> RowSampling:
    """How the token at `position` of the sequence is chosen."""
    wanted = seq.sampling
    penalties = None
    if wanted.needs_history:
        penalties = RowPenalties(
            prompt_ids=seq.tokens[: seq.num_prompt],
            output_ids=seq.tokens[seq.num_prompt :],
            repetition=wanted.repetition_penalty,
            presence=wanted.presence_penalty,
            frequency=wanted.frequency_penalty,
        )
    return RowSampling(
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=seq.seed,
        position=position,
        penalties=penalties,
        banned_ids=tuple(seq.stop_ids) if seq.num_generated < wanted.min_tokens else (),
    )
