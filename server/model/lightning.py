"""A layer of lightning attention: one product, norms and rotation of heads, the rule, norm and gates of its result.

Results are not divided by sqrt(key_dim), as they are in the definition: the norm behind them has an epsilon that is
key_dim times as large, which makes the same of them.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.fused.gated_norm import norm_and_gate
from kernels.fused.rope_kv import rotate_queries
from kernels.recurrence.calls import RecurrenceState, RunRecurrence
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from server.model.gated_delta import OnRecurrence
from server.model.linear import Product
from server.model.step import Step


@dataclass(frozen=True, slots=True)
class Lightning:
    """place      among the recurrent layers
    heads      and the numbers of one
    projected  makes queries, keys, values, and the gates of the result
    norms      [numbers of a head] of queries and of keys, before they are rotated; None: they are not normed
    norm       [heads * numbers of one], of the result; groups: how many of its parts are normed each by itself
    rope       which of the decoder's rotary tables this layer's is; cos_sin: that table
    run        computes the recurrence, and reads and writes the states
    observe    is handed queries and keys, rotated, values and gates, no gates of the rule, and its results before they
               are normed; None of most steps
    """

    place: int
    heads: tuple[int, int]
    projected: Product
    output: Product
    weights: FixedDecayWeights
    norms: tuple[Tensor, Tensor] | None
    norm: Tensor
    groups: int
    eps: float
    rope: int
    cos_sin: Tensor
    run: RunRecurrence
    observe: OnRecurrence | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.states is not None, "a step of a model with recurrent layers has their states"
        num_tokens, (num_heads, dim), size = x.shape[0], self.heads, self.heads[0] * self.heads[1]
        projected = self.projected(x, step)
        for index, norm in enumerate(self.norms or (None, None)):  # of queries, then of keys
            rotate_queries(
                projected[:, index * size : (index + 1) * size].view(num_tokens, num_heads, dim),
                self.cos_sin if step.tables is None else step.tables[self.rope],
                step.positions,
                q_norm=norm,
                eps=self.eps,
                turns=None if step.turns is None else step.turns[self.rope],
            )
        out = x.new_empty(num_tokens, num_heads, dim)
        state, none = RecurrenceState(*step.states.cache.layers[self.place].tensors), projected[:, :0]
        self.run(projected[:, : 3 * size], none, none, self.weights, step.states.rows, state, out)
        if self.observe is not None:
            self.observe(projected, none, out)
        gates, groups = projected[:, 3 * size :], out.view(num_tokens, self.groups, -1)
        return self.output(norm_and_gate(groups, gates, self.norm, self.eps * dim, is_sigmoid=True), step)
