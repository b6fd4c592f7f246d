"""Layers of the gated delta rule (Qwen 3 Next, Qwen 3.5): their sizes, and what they keep of a sequence.

Source: Yang et al. 2024 (Gated Delta Networks).
"""

from dataclasses import dataclass, field, replace

from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Dtype
from qualification.model.config import ModelConfig, RecurrenceConfig, StateTensor
from qualification.model.fields import ModelConfigError


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig(RecurrenceConfig):
    """sizes        heads, their dimensions and the width of the convolution
    state_dtype  of the matrices that a sequence's past is folded into
    hidden_size  of what the layer reads
    num_drafted  tokens of a sequence that a step may compute and take back
    """

    sizes: RecurrenceSizes = field(kw_only=True)
    state_dtype: Dtype = field(kw_only=True)
    hidden_size: int = field(kw_only=True)
    num_drafted: int = field(default=0, kw_only=True)

    @classmethod
    def of(
        cls, sizes: RecurrenceSizes, hidden_size: int, state_dtype: Dtype = Dtype.FP32, num_drafted: int = 0
    ) -> "GatedDeltaConfig":
        """Return the mixer of these sizes, with what it keeps and how many numbers it has."""
        # Two dtypes that differ stand for the weights' and the state's: the former is known when the model is served.
        tensors = zip(
            sizes.state_tensors(Dtype.FP16, state_dtype, num_drafted),
            sizes.state_tensors(Dtype.BF16, state_dtype, num_drafted),
            strict=True,
        )
        state = tuple(StateTensor(shape, dtype if dtype is other else None) for (shape, dtype), (_, other) in tensors)
        heads, values = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
        count = hidden_size * (sizes.conv_dim + 2 * values + 2 * heads)
        count += sizes.conv_dim * sizes.width + 2 * heads + sizes.value_dim
        name = "the gated delta rule"
        return cls(
            name,
            state,
            count,
            sizes=sizes,
            state_dtype=state_dtype,
            hidden_size=hidden_size,
            num_drafted=num_drafted,
        )

    @property
    def value_size(self) -> int:
        """Return the numbers of a token's values, which are as many as the gates of its result."""
        return self.sizes.num_value_heads * self.sizes.value_dim

    @property
    def projected_size(self) -> int:
        """Return the rows of what makes queries, keys, values and the gates of the result."""
        return self.sizes.conv_dim + self.value_size

    def of_rank(self, rank: int, world: int) -> "GatedDeltaConfig":
        """Return the heads of one of several ranks. Raises ModelConfigError where they cannot be shared equally."""
        del rank
        sizes = self.sizes
        if sizes.num_key_heads % world:
            raise ModelConfigError(
                f"{sizes.num_key_heads} key heads of {self.name} cannot be split among {world} ranks: {world} must "
                "divide them"
            )
        own = replace(sizes, num_key_heads=sizes.num_key_heads // world, num_value_heads=sizes.num_value_heads // world)
        return GatedDeltaConfig.of(own, self.hidden_size, self.state_dtype, self.num_drafted)

    def taking_back(self, num_drafted: int) -> "GatedDeltaConfig":
        return GatedDeltaConfig.of(self.sizes, self.hidden_size, self.state_dtype, num_drafted)


def with_state_dtype(model: ModelConfig, dtype: Dtype) -> ModelConfig:
    """Return the model with states of another dtype in its layers of the gated delta rule."""
    layers = tuple(
        replace(layer, mixer=GatedDeltaConfig.of(it.sizes, it.hidden_size, dtype, it.num_drafted))
        if isinstance(it := layer.mixer, GatedDeltaConfig)
        else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


def with_drafted_tokens(model: ModelConfig, num_drafted: int) -> ModelConfig:
    """Return the model with states from which so many tokens of a step can be taken back."""
    layers = tuple(
        replace(layer, mixer=layer.mixer.taking_back(num_drafted))
        if isinstance(layer.mixer, RecurrenceConfig)
        else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)
