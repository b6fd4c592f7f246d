"""The launches that forms with kernels of their own share: preparation of tokens, and what slots keep of them.

Between the two is the scan. The grids depend on the numbers of tokens and rows alone, so that a CUDA graph holds them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState
from kernels.recurrence.portable.keep import keep_launches
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.vocabulary.shape import Phase

_TOKENS = 16  # of a program that prepares
_CHANNELS = 1024  # of inputs that are kept, of a program
EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


@dataclass(frozen=True, slots=True)
class FormCall:
    """A call of one token or more, and the tokens that `prepare` leaves to the scan.

    is_convolved         whether tokens are convolved before the rule, so that slots keep inputs
    queries, keys        [T, key_heads, key_dim], values [T, value_heads, value_dim]: as the rule takes them
    decays               [T, value_heads, decays of a head] fp32, gates [T, value_heads] fp32
    """

    qkv: Tensor
    sizes: RecurrenceSizes
    rows: RecurrenceRows
    state: RecurrenceState
    out: Tensor
    is_convolved: bool
    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor
    gates: Tensor

    @classmethod
    def of(
        cls,
        qkv: Tensor,
        sizes: RecurrenceSizes,
        rows: RecurrenceRows,
        state: RecurrenceState,
        out: Tensor,
        *,
        is_convolved: bool,
        decay_dim: int = 1,
    ) -> "FormCall":
        """`decay_dim`: decays of a token and value head: 1, or one of each channel of its keys."""
        num_tokens = qkv.shape[0]
        queries, keys = (qkv.new_empty(num_tokens, sizes.num_key_heads, sizes.key_dim) for _ in range(2))
        values = qkv.new_empty(num_tokens, sizes.num_value_heads, sizes.value_dim)
        decays = torch.empty(num_tokens, sizes.num_value_heads, decay_dim, dtype=torch.float32, device=qkv.device)
        gates = torch.empty(num_tokens, sizes.num_value_heads, dtype=torch.float32, device=qkv.device)
        return cls(qkv, sizes, rows, state, out, is_convolved, queries, keys, values, decays, gates)

    @property
    def num_tokens(self) -> int:
        return int(self.qkv.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.rows.starts.shape[0])

    @property
    def num_writes(self) -> int:
        return int(self.rows.write_tokens.shape[0])

    @property
    def is_half(self) -> bool:
        return self.qkv.element_size() == 2

    @property
    def heads(self) -> dict[str, int]:
        """Constexprs of every kernel."""
        sizes, ring = self.sizes, self.state.keys.shape[1]
        heads = {"KEY_HEADS": sizes.num_key_heads, "VALUE_HEADS": sizes.num_value_heads}
        return {**heads, "KEY_DIM": sizes.key_dim, "RING": ring}

    @property
    def folding(self) -> dict[str, int]:
        """Constexprs of kernels that write states, or beside them."""
        return {"FOLDS_ALL": self.rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}

    @property
    def of_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows.starts, self.rows.stops, self.rows.firsts

    @property
    def scanned(self) -> tuple[Tensor, ...]:
        """Rows and slots, as every scan takes them behind its own tensors."""
        rows, state = self.rows, self.state
        slots = (rows.folded, rows.sources, rows.targets, rows.write_tokens, rows.write_slots)
        return *self.of_rows, *slots, state.states, state.keys, state.values, state.decays

    @property
    def scanned_strides(self) -> tuple[int, ...]:
        state = self.state
        kept = (state.states, state.keys, state.values, state.decays)
        return self.out.stride(0), *(int(it.stride(0)) for it in kept)

    def prepare(self, kernel: Any, arguments: tuple[Any, ...], looked_at: int, *, keeps: bool) -> Launch:
        """Return the launch that prepares the tokens.

        arguments  of the kernel, behind qkv and before those of every form
        looked_at  rows that a program looks at together
        keeps      whether it writes the tokens to the rings of their slots
        """
        sizes, state, rows = self.sizes, self.state, self.rows
        of_inputs: tuple[Any, ...] = ()
        convolution = {}
        if self.is_convolved:
            of_inputs = (rows.sources, state.inputs, state.inputs.stride(0))
            convolution = {"WIDTH": sizes.width, "INPUT_RING": state.inputs.shape[1]}
        return Launch(
            kernel,
            (triton.cdiv(self.num_tokens, _TOKENS), 2 * sizes.num_key_heads + sizes.num_value_heads),
            (
                self.qkv, *arguments, *of_inputs, *self.of_rows, rows.targets, state.keys, state.decays, self.queries,
                self.keys, self.values, self.decays, self.gates, self.out, self.num_tokens, self.num_rows,
                self.qkv.stride(0), state.keys.stride(0), state.decays.stride(0),
            ),
            {
                **self.heads, **convolution, "VALUE_DIM": sizes.value_dim, "KEEPS": keeps, "BLOCK_T": _TOKENS,
                "BLOCK_R": looked_at, "BLOCK_D": padded(max(sizes.key_dim, sizes.value_dim)), **EXACT,
            },
        )  # fmt: skip

    def keep(self, kernel: Any, parts: int, options: dict[str, Any]) -> list[Launch]:
        """Return the launches that keep what slots get, behind the scan; parts: programs of a slot, less inputs'."""
        rows, state, sizes = self.rows, self.state, self.sizes
        arguments = (
            self.qkv, self.keys, self.decays, *self.of_rows, rows.sources, rows.targets, rows.write_tokens,
            rows.write_slots, state.inputs, state.keys, state.decays, self.num_rows, self.qkv.stride(0),
            state.inputs.stride(0), state.keys.stride(0), state.decays.stride(0),
        )  # fmt: skip
        constants = {
            **self.heads, **self.folding, "CONV_DIM": sizes.conv_dim,
            "INPUT_RING": state.inputs.shape[1] if self.is_convolved else 1, "BLOCK_D": padded(sizes.key_dim),
            "BLOCK_C": _CHANNELS, **options,
        }  # fmt: skip
        of_inputs = triton.cdiv(sizes.conv_dim, _CHANNELS) if self.is_convolved else 0
        return keep_launches(kernel, self.num_rows, self.num_writes, parts + of_inputs, arguments, constants)


def padded(dims: int) -> int:
    """Return the width of a tile that holds so many numbers: a power of 2, of 16 at least."""
    return max(16, int(triton.next_power_of_2(dims)))
