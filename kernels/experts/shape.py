"""The shape of a mixture of experts: everything that selects a kernel for its products, and what they cost."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kernels.experts.formats import AnyExpertFormat, FewBitFormat, expert_format, why_not_experts
from kernels.experts.kinds import MXFP4_BLOCK, ClampedSwiglu, ExpertActivation, ExpertFormat
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.linear.formats.int4_formats import bytes_of
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype

_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"
_LINE = re.compile(
    r"experts (?P<dtype>\w+) (?P<format>\w+) e(?P<experts>\d+):(?P<active>\d+) h(?P<hidden>\d+) w(?P<width>\d+) "
    rf"(?:clamped(?P<alpha>{_NUMBER}):(?P<limit>{_NUMBER})|capped(?P<bound>{_NUMBER})|(?P<activation>\w+))"
    r"(?P<bias> bias)? r-(?P<rows>\w+)"
)
# Those of `kinds.py`, which the digests of most paths cover, and two that have paths of their own.
AnyExpertActivation = ExpertActivation | CappedSilu | Ungated
_UNGATED = {it.value: it for it in Ungated}


class ExpertForm(Enum):
    """Formula of an expert; the paths of each form are its own."""

    GATED = "gated"  # down(activation(gate) * up)
    CAPPED = "gated with bounds"  # the same, of which each factor is bounded
    UNGATED = "ungated"  # down(activation(up))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Products of a mixture: down(activation(gate) * up) of each token's experts, and their weighted sum.

    Without a gate, where the activation is one of those, it is down(activation(up)).

    dtype    of hidden states and of the result; of the weights too, unless the format says otherwise
    width    of one expert
    rows     tokens of a call, whatever experts they visit
    """

    dtype: Dtype
    format: AnyExpertFormat
    num_experts: int
    num_active: int
    hidden: int
    width: int
    activation: AnyExpertActivation
    has_bias: bool
    rows: TokenRows

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that no mixture has."""
        if not 1 <= self.num_active <= self.num_experts:
            raise ValueError(f"experts of a token: expected 1 to {self.num_experts}, found {self.num_active}")
        if self.format is ExpertFormat.MXFP4 and (self.hidden % MXFP4_BLOCK or self.width % MXFP4_BLOCK):
            sizes = f"hidden size {self.hidden} and width {self.width}"
            raise ValueError(f"mxfp4 has blocks of {MXFP4_BLOCK} numbers, which must divide {sizes}")
        if (reason := why_not_experts(self.format, self.hidden, self.width)) is not None:
            raise ValueError(reason)

    @property
    def operator(self) -> Operator:
        return Operator.EXPERTS

    @property
    def kind(self) -> str:
        """The line without the bucket: what the layers of a mixture share."""
        parts = [
            Operator.EXPERTS.value,
            self.dtype.value,
            self.format.value,
            f"e{self.num_experts}:{self.num_active}",
            f"h{self.hidden}",
            f"w{self.width}",
            _name_of(self.activation),
        ]
        return " ".join([*parts, *(["bias"] if self.has_bias else [])])

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        return f"{self.kind} r-{self.rows.label}"

    @property
    def form(self) -> ExpertForm:
        if isinstance(self.activation, Ungated):
            return ExpertForm.UNGATED
        return ExpertForm.CAPPED if isinstance(self.activation, CappedSilu) else ExpertForm.GATED

    @property
    def num_products(self) -> int:
        """Return how many matrices an expert has: gate, up and down, or the last two."""
        return 2 if self.form is ExpertForm.UNGATED else 3

    def flops(self, num_rows: int) -> int:
        """Floating-point operations of the products of each visit."""
        return 2 * num_rows * self.num_active * self.num_products * self.hidden * self.width

    def hbm_bytes(self, num_rows: int) -> int:
        """HBM bytes when the weights of as many experts as the rows can visit, rows and result cross memory once."""
        numbers = min(self.num_experts, num_rows * self.num_active) * self.num_products * self.hidden * self.width
        if isinstance(self.format, FewBitFormat):
            weights = bytes_of(self.format.of_weights, numbers, self.dtype)
        elif self.format is ExpertFormat.MXFP4:  # 4 bits, and 32 of them a byte more
            weights = numbers // 2 + numbers // MXFP4_BLOCK
        else:
            weights = numbers * self.dtype.num_bytes
        return weights + 2 * num_rows * self.hidden * self.dtype.num_bytes


def parse_experts_shape(text: str) -> ExpertsShape:
    """Parse a shape's line. Raises ValueError for text that `str` makes of no shape."""
    found = _LINE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no shape of experts")
    field = found.groupdict()
    shape = ExpertsShape(
        dtype=Dtype(field["dtype"]),
        format=expert_format(field["format"]),
        num_experts=int(field["experts"]),
        num_active=int(field["active"]),
        hidden=int(field["hidden"]),
        width=int(field["width"]),
        activation=_activation_of(field),
        has_bias=field["bias"] is not None,
        rows=TokenRows(field["rows"]),
    )
    if str(shape) != text:
        raise ValueError(f"{text!r} is no shape of experts as {shape} is written")
    return shape


def _name_of(activation: AnyExpertActivation) -> str:
    """Return an activation as a shape's line has it."""
    if isinstance(activation, ClampedSwiglu):
        return f"clamped{activation.alpha!r}:{activation.limit!r}"
    return f"capped{activation.limit!r}" if isinstance(activation, CappedSilu) else activation.value


def _activation_of(field: Mapping[str, str | None]) -> AnyExpertActivation:
    """Return the activation of a shape's line, by the groups of `_LINE`."""
    if (bound := field["bound"]) is not None:
        return CappedSilu(float(bound))
    if (alpha := field["alpha"]) is not None:
        return ClampedSwiglu(float(alpha), float(field["limit"] or 0))
    name = field["activation"]
    return _UNGATED[name] if name in _UNGATED else Activation(name)
