"""Kinds of mixtures of experts, as data: torch-free, so that a model's configuration can hold them."""

from dataclasses import dataclass
from enum import Enum

from kernels.fused.activation_kind import Activation


class Scores(Enum):
    """Function from an expert's logit to its score."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # of each expert alone


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Choice of the experts that a token visits, and of their weights.

    renormalizes       whether a token's weights are divided by their sum. Of softmax scores that is the softmax of the
                       chosen logits alone
    num_groups         runs of experts of the same size: a token visits experts of `num_active_groups` of them only
    num_active_groups  the groups with the largest sums of their two best scores
    scale              what the weights are multiplied by in the end
    """

    num_experts: int
    num_active: int
    scores: Scores = Scores.SOFTMAX
    renormalizes: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that fit no routing."""
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and size < 2):
            raise ValueError(
                f"{self.num_experts} experts cannot be {self.num_groups} groups of the same size, of two or more each"
            )
        if not 1 <= self.num_active_groups <= self.num_groups:
            raise ValueError(f"active groups: expected 1 to {self.num_groups}, found {self.num_active_groups}")
        if not 1 <= self.num_active <= size * self.num_active_groups:
            most = size * self.num_active_groups
            raise ValueError(f"experts of a token: expected 1 to {most}, found {self.num_active}")


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gpt-oss's activation: g * sigmoid(alpha * g) * (u + 1), of g = min(gate, limit) and u = up within +-limit."""

    alpha: float = 1.702
    limit: float = 7.0


class ExpertFormat(Enum):
    """Format of the matrices of experts in a checkpoint, and then in memory."""

    PLAIN = "plain"  # as all other weights
    MXFP4 = "mxfp4"  # blocks of numbers of 4 bits, and their scales


ExpertActivation = Activation | ClampedSwiglu
MXFP4_BLOCK = 32  # numbers that share a scale
