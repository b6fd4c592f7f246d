"""Choice and scores of tokens by a worker: an object, whose place another one can take in an engine that runs."""

from torch import Tensor

from kernels.sampling.sampling import SampleResult, SamplingTensors, greedy, sample
from server.engine.execution.sampling import score


class Sampler:
    """Chooses and scores tokens by the kernels of sampling."""

    def choose(self, logits: Tensor, sampling: SamplingTensors | None) -> SampleResult:
        """Choose a token for each row of logits [R, V] fp32, which serve as scratch memory; None: the likeliest one."""
        return greedy(logits) if sampling is None else sample(logits, sampling)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int, *, is_reproducible: bool = False) -> Tensor:
        """Return what `score` of execution/sampling.py does."""
        return score(logits, token_ids, num_top, is_reproducible=is_reproducible)
