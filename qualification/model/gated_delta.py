"""Layers of the gated delta rule (Qwen 3 Next, Qwen 3.5), of Kimi's, of Mamba2's state space, of lightning attention.

They are of the same sizes. Source: Yang et al. 2024 (Gated Delta Networks); Kimi Team 2025 (Kimi Linear); Dao and Gu
2024 (Mamba-2); Qin et al. 2024 (Lightning Attention-2).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kernels.linear.shape import PLAIN
from kernels.recurrence.kept import kept_tensors
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Dtype
from qualification.model.config import (
    LayerConfig,
    LinearFormats,
    ModelConfig,
    RecurrenceConfig,
    RecurrenceProducts,
    RopeConfig,
    StateTensor,
)
from qualification.model.fields import ModelConfigError

_MULTIPLE = 8  # of results that every path of products takes, and of numbers that kernels read together


@dataclass(frozen=True, slots=True)
class StateSpaceRule:
    """least_step, most_step  that the steps of a state space are held between.

    norms_result  whether its gated results are normed, group by group
    input_scales  what the first product's results are multiplied by: C, B, x, gates and steps
    """

    least_step: float
    most_step: float
    norms_result: bool = True
    input_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class FixedDecayRule:
    """Lightning attention: each head decays by a number of its own; its queries and keys are normed and rotated.

    slopes       of each head: its decay is e^-slope
    rope         rotates the first numbers of each head
    num_groups   of neighbouring heads' results, each normed by itself
    norms_heads  whether each head of queries and of keys is normed before it is rotated
    """

    slopes: tuple[float, ...]
    rope: RopeConfig
    num_groups: int
    norms_heads: bool


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig(RecurrenceConfig):
    """sizes        heads, their dimensions and the width of the convolution
    state_dtype  of the matrices that a sequence's past is folded into
    hidden_size  of what the layer reads
    num_drafted  tokens of a sequence that a step may compute and take back
    rule         of a state space, whose queries, keys and values are C, B and x; None: a delta rule
    has_channel_decays  whether each channel of a key has a decay of its own (Kimi Delta Attention): it is made, as
                 are the gates of the result, by two products with `value_dim` numbers between them
    fixed        of lightning attention, which has no convolution and no gates but those of its result; else None
    """

    sizes: RecurrenceSizes = field(kw_only=True)
    state_dtype: Dtype = field(kw_only=True)
    hidden_size: int = field(kw_only=True)
    num_drafted: int = field(default=0, kw_only=True)
    rule: StateSpaceRule | None = field(default=None, kw_only=True)
    has_channel_decays: bool = field(default=False, kw_only=True)
    fixed: FixedDecayRule | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        sizes: RecurrenceSizes,
        hidden_size: int,
        state_dtype: Dtype = Dtype.FP32,
        num_drafted: int = 0,
        rule: StateSpaceRule | None = None,
        *,
        has_channel_decays: bool = False,
        fixed: FixedDecayRule | None = None,
        output_scale: float = 1.0,
    ) -> "GatedDeltaConfig":
        """Return the mixer of these sizes, with what it keeps and how many numbers it has."""
        form = _form_of(rule, fixed, has_channel_decays=has_channel_decays)
        # Two dtypes that differ stand for the weights' and the state's: the former is known when the model is served.
        tensors = zip(
            kept_tensors(form, sizes, Dtype.FP16, state_dtype, num_drafted),
            kept_tensors(form, sizes, Dtype.BF16, state_dtype, num_drafted),
            strict=True,
        )
        state = tuple(StateTensor(shape, dtype if dtype is other else None) for (shape, dtype), (_, other) in tensors)
        heads, values = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
        if form is RecurrenceForm.CHANNEL_DELTA:
            decays = heads * sizes.key_dim
            count = hidden_size * (sizes.conv_dim + heads + 2 * sizes.value_dim + values)
            count += sizes.value_dim * (decays + values + 1) + sizes.conv_dim * sizes.width + heads + decays
        elif fixed is not None:
            count = hidden_size * (sizes.conv_dim + 2 * values) + values + 2 * sizes.key_dim * fixed.norms_heads
        elif rule is None:
            count = hidden_size * (sizes.conv_dim + 2 * values + 2 * heads)
            count += sizes.conv_dim * sizes.width + 2 * heads + sizes.value_dim
        else:
            count = hidden_size * (sizes.conv_dim + 2 * values + heads)
            count += sizes.conv_dim * (sizes.width + 1) + 3 * heads + values * rule.norms_result
        return cls(
            _NAMES[form],
            state,
            count,
            output_scale,
            sizes=sizes,
            state_dtype=state_dtype,
            hidden_size=hidden_size,
            num_drafted=num_drafted,
            rule=rule,
            has_channel_decays=has_channel_decays,
            fixed=fixed,
        )

    @property
    def form(self) -> RecurrenceForm:
        return _form_of(self.rule, self.fixed, has_channel_decays=self.has_channel_decays)

    @property
    def num_decays(self) -> int:
        """Return the decays of a token: of each value head, or of each channel of each."""
        return self.sizes.num_value_heads * (self.sizes.key_dim if self.has_channel_decays else 1)

    @property
    def products(self) -> RecurrenceProducts:
        first, output = self.projected_size * self.hidden_size, self.value_size * self.hidden_size
        return RecurrenceProducts(first, output, self.num_gates * self.hidden_size)

    def input_rows(self, formats: LinearFormats) -> tuple[int, int]:
        """Return the rows of the first product, and of another that makes gates: none where the first makes them too.

        Weights that are not quantised are one, gates last: a layer launches one product less.
        """
        first, gates = self.projected_size, self.num_gates
        is_one = formats.qkv == formats.gates == PLAIN and gates % _MULTIPLE == 0
        return (first + gates, 0) if is_one else (first, gates)

    @property
    def num_gates(self) -> int:
        """Return the gates of writing and of decay of a token, or numbers that make decays and gates of the result."""
        heads = self.sizes.num_value_heads
        if self.has_channel_decays:
            return heads + 2 * self.sizes.value_dim
        return 2 * heads if self.form is RecurrenceForm.GATED_DELTA else 0

    @property
    def value_size(self) -> int:
        """Return the numbers of a token's values, which are as many as the gates of its result."""
        return self.sizes.num_value_heads * self.sizes.value_dim

    @property
    def projected_size(self) -> int:
        """Return the numbers of queries, keys, values, gates of the result and, of a state space, steps.

        Where channels have decays the first product makes no gates of the result.
        """
        if self.has_channel_decays:
            return self.sizes.conv_dim
        return self.sizes.conv_dim + self.value_size + (0 if self.rule is None else self.sizes.num_value_heads)

    @property
    def norm_size(self) -> int:
        """Return the weights of the norm of the result: of one head, or of all where groups of heads are normed.

        0 where there is no such norm.
        """
        if self.rule is not None and not self.rule.norms_result:
            return 0
        return self.sizes.value_dim if self.rule is None and self.fixed is None else self.value_size

    def of_rank(self, rank: int, world: int) -> "GatedDeltaConfig":
        """Return the heads of one of several ranks. Raises ModelConfigError where they cannot be shared equally."""
        sizes, fixed = self.sizes, self.fixed
        if sizes.num_key_heads % world:
            raise ModelConfigError(
                f"{sizes.num_key_heads} key heads of {self.name} cannot be split among {world} ranks: {world} must "
                "divide them"
            )
        own = replace(sizes, num_key_heads=sizes.num_key_heads // world, num_value_heads=sizes.num_value_heads // world)
        if fixed is not None:
            if fixed.num_groups % world:
                raise ModelConfigError(
                    f"{fixed.num_groups} groups of heads that {self.name} norms cannot be split among {world} ranks: "
                    f"{world} must divide them"
                )
            first, count = rank * own.num_value_heads, own.num_value_heads
            fixed = replace(fixed, slopes=fixed.slopes[first : first + count], num_groups=fixed.num_groups // world)
        return self.changed(sizes=own, fixed=fixed)

    def taking_back(self, num_drafted: int) -> "GatedDeltaConfig":
        return self.changed(num_drafted=num_drafted)

    def changed(
        self,
        *,
        sizes: RecurrenceSizes | None = None,
        state_dtype: Dtype | None = None,
        num_drafted: int | None = None,
        fixed: FixedDecayRule | None = None,
    ) -> "GatedDeltaConfig":
        """Return the mixer with other sizes, another dtype of states or number of drafted tokens, and what it keeps."""
        return GatedDeltaConfig.of(
            sizes or self.sizes,
            self.hidden_size,
            state_dtype or self.state_dtype,
            self.num_drafted if num_drafted is None else num_drafted,
            self.rule,
            has_channel_decays=self.has_channel_decays,
            fixed=fixed or self.fixed,
            output_scale=self.output_scale,
        )


_NAMES = {
    RecurrenceForm.GATED_DELTA: "the gated delta rule",
    RecurrenceForm.STATE_SPACE: "the state space",
    RecurrenceForm.FIXED_DECAY: "lightning attention",
    RecurrenceForm.CHANNEL_DELTA: "Kimi Delta Attention",
}


def _form_of(rule: StateSpaceRule | None, fixed: FixedDecayRule | None, *, has_channel_decays: bool) -> RecurrenceForm:
    if rule is not None:
        return RecurrenceForm.STATE_SPACE
    if fixed is not None:
        return RecurrenceForm.FIXED_DECAY
    return RecurrenceForm.CHANNEL_DELTA if has_channel_decays else RecurrenceForm.GATED_DELTA


def with_state_dtype(model: ModelConfig, dtype: Dtype) -> ModelConfig:
    """Return the model with states of another dtype in its layers that keep such."""

    def changed(recurrence: RecurrenceConfig) -> RecurrenceConfig:
        return recurrence.changed(state_dtype=dtype) if isinstance(recurrence, GatedDeltaConfig) else recurrence

    return _with_recurrences(model, changed)


def with_drafted_tokens(model: ModelConfig, num_drafted: int) -> ModelConfig:
    """Return the model with states from which so many tokens of a step can be taken back."""
    return _with_recurrences(model, lambda recurrence: recurrence.taking_back(num_drafted))


def _with_recurrences(model: ModelConfig, change: Callable[[RecurrenceConfig], RecurrenceConfig]) -> ModelConfig:
    def changed(layer: LayerConfig) -> LayerConfig:
        mixer = change(layer.mixer) if isinstance(layer.mixer, RecurrenceConfig) else layer.mixer
        return replace(layer, mixer=mixer, beside=None if layer.beside is None else change(layer.beside))

    return replace(model, layers=tuple(map(changed, model.layers)))
