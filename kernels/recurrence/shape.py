"""The shape of a recurrence: everything that selects a kernel for it, and what it costs."""

import re
from dataclasses import dataclass

from kernels.recurrence.kept import kept_tensors
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase

RECURRENCE_PHASES = (Phase.EXTEND, Phase.DECODE, Phase.VERIFY)
_LINE = re.compile(
    r"recurrence (?P<phase>\w+) (?P<dtype>\w+)/state-(?P<state>\w+) h(?P<keys>\d+):(?P<values>\d+) "
    r"d(?P<key_dim>\d+):(?P<value_dim>\d+) conv(?P<width>\d+)(?: (?P<form>state-space|fixed-decay|channel-delta))? "
    r"r-(?P<rows>\w+)"
)


@dataclass(frozen=True, slots=True)
class RecurrenceShape:
    """A rule with its convolution, and what is computed of each token before: norms, gates, steps.

    phase        EXTEND for tokens of prompts, the first ones or later ones, beside which others may be
    dtype        of tokens and results
    state_dtype  of the states
    rows         tokens of a call
    form         the rule; of a state space keys are B, queries C, values x; of a fixed decay width is 1: no convolution
    """

    phase: Phase
    dtype: Dtype
    state_dtype: Dtype
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    rows: TokenRows
    form: RecurrenceForm = RecurrenceForm.GATED_DELTA

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer has."""
        if self.phase not in RECURRENCE_PHASES:
            raise ValueError("tokens of prompts are of the phase extend, whether others are before them or not")
        RecurrenceSizes(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.width)
        if self.form is RecurrenceForm.FIXED_DECAY and self.width != 1:
            raise ValueError(
                f"a recurrence of the form {self.form.value} has no convolution: width 1, found {self.width}"
            )

    @classmethod
    def of(
        cls,
        sizes: RecurrenceSizes,
        phase: Phase,
        dtype: Dtype,
        state_dtype: Dtype,
        rows: TokenRows,
        form: RecurrenceForm = RecurrenceForm.GATED_DELTA,
    ) -> "RecurrenceShape":
        return cls(
            phase, dtype, state_dtype, sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim,
            sizes.width, rows, form,
        )  # fmt: skip

    @property
    def sizes(self) -> RecurrenceSizes:
        return RecurrenceSizes(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.width)

    def state_tensors(self, num_drafted: int) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
        """Return shape and dtype of each tensor of `RecurrenceState`; see `RecurrenceSizes.state_tensors`."""
        return kept_tensors(self.form, self.sizes, self.dtype, self.state_dtype, num_drafted)

    @property
    def operator(self) -> Operator:
        return RECURRENCE

    @property
    def kind(self) -> str:
        """The line without the bucket."""
        parts = [
            RECURRENCE.value,
            self.phase.value,
            f"{self.dtype.value}/state-{self.state_dtype.value}",
            f"h{self.num_key_heads}:{self.num_value_heads}",
            f"d{self.key_dim}:{self.value_dim}",
            f"conv{self.width}",
            *([] if self.form is RecurrenceForm.GATED_DELTA else [self.form.value]),
        ]
        return " ".join(parts)

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        return f"{self.kind} r-{self.rows.label}"

    def flops(self, num_rows: int) -> int:
        """Floating-point operations of the rule itself, token by token: decay, read, update, read; not of chunks."""
        of_number = 5 if self.form in (RecurrenceForm.STATE_SPACE, RecurrenceForm.FIXED_DECAY) else 7  # they read once
        return of_number * num_rows * self.num_value_heads * self.key_dim * self.value_dim

    def hbm_bytes(self, num_rows: int) -> int:
        """HBM bytes when tokens cross memory once, and states once for each token of decode, else once for 64.

        In decode a state is read, and one in 64 times written, beside half a chunk of tokens behind its border.
        """
        state = self.num_value_heads * self.key_dim * self.value_dim * self.state_dtype.num_bytes
        tokens = num_rows * (self.sizes.conv_dim + self.num_value_heads * self.value_dim) * self.dtype.num_bytes
        if self.phase is Phase.EXTEND:
            return tokens + 2 * state * -(-num_rows // CHUNK)
        kept = self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
        decays = self.num_value_heads * (self.key_dim if self.form is RecurrenceForm.CHANNEL_DELTA else 1)
        behind = CHUNK // 2 * (kept * self.dtype.num_bytes + decays * Dtype.FP32.num_bytes)
        return tokens + num_rows * (state + state // CHUNK + behind)


def parse_recurrence_shape(text: str) -> RecurrenceShape:
    """Parse a shape's line. Raises ValueError for text that `str` makes of no shape."""
    found = _LINE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no shape of a recurrence")
    field = found.groupdict()
    sizes = RecurrenceSizes(*(int(field[name]) for name in ("keys", "values", "key_dim", "value_dim", "width")))
    shape = RecurrenceShape.of(
        sizes,
        Phase(field["phase"]),
        Dtype(field["dtype"]),
        Dtype(field["state"]),
        TokenRows(field["rows"]),
        RecurrenceForm(field["form"] or RecurrenceForm.GATED_DELTA.value),
    )
    if str(shape) != text:
        raise ValueError(f"{text!r} is no shape of a recurrence as {shape} is written")
    return shape
