"""The recurrence's kernel for rows of few tokens on sm_90, run in numpy: its bits, and what it leaves in the slots."""

from dataclasses import replace

import torch

from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.reference.compare import errors_of
from kernels.reference.recurrence import recurrence_reference
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase
from qualification.measure.inputs.recurrence_inputs import Content, drawn_tokens, drawn_weights
from qualification.measure.inputs.state_slots import Part, recurrence_slots
from support.emulator.recurrence_by_numpy import run_for_hopper
from support.recurrence_calls import Cut, call_in_parts, random_sequence, state_of

CPU = torch.device("cpu")
SIZES = RecurrenceSizes(1, 2, 128, 128, 4)
LENGTH = 71
ONE, MOVED = Cut(1, Phase.DECODE), Cut(1, Phase.DECODE, moves=True)
PROMPT = [Cut(5, Phase.VERIFY)] * 9
# Rows across borders of blocks and of the chunk, of one that is left unfolded, and to other slots.
WAYS = {
    "verified": (
        *PROMPT, ONE, Cut(4, Phase.VERIFY, 2), Cut(5, Phase.VERIFY), Cut(2, Phase.VERIFY, 1), Cut(3, Phase.VERIFY),
        Cut(5, Phase.VERIFY, 1), Cut(1, Phase.VERIFY), Cut(3, Phase.VERIFY), Cut(5, Phase.VERIFY), ONE,
    ),
    "moving": (
        *PROMPT, MOVED, Cut(4, Phase.VERIFY, 2, moves=True), Cut(5, Phase.VERIFY, moves=True), Cut(2, Phase.VERIFY, 1),
        Cut(5, Phase.VERIFY), Cut(3, Phase.VERIFY, 1, moves=True), Cut(5, Phase.VERIFY, moves=True), MOVED,
        Cut(2, Phase.VERIFY, moves=True), Cut(2, Phase.VERIFY),
    ),
    "unfolded": (*PROMPT, *[ONE] * 17, Cut(5, Phase.VERIFY), *[ONE] * 4),
    "few": (*PROMPT, *[Cut(2, Phase.VERIFY)] * 13),
}  # fmt: skip


def test_verified_tokens_are_right_and_have_the_bits_of_decoded_ones() -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.FP16, seed=1)
    decoded = call_in_parts(run_for_hopper, sequence, (*PROMPT, *[ONE] * 26))
    inputs = sequence.qkv[None], sequence.a[None], sequence.b[None], sequence.weights, sequence.sizes
    reference = recurrence_reference(*inputs, torch.tensor([LENGTH // CHUNK * CHUNK]), torch.float32)
    assert errors_of(decoded.out, reference.out).is_within_rule
    assert errors_of(state_of(decoded).states, reference.states).is_within_rule
    for name, cuts in WAYS.items():
        found = call_in_parts(run_for_hopper, sequence, cuts)
        assert torch.equal(found.out, decoded.out), name
        assert torch.equal(state_of(found).states, state_of(decoded).states), name


def test_rows_of_a_batch_have_the_bits_that_they_have_alone() -> None:
    """Compare rows of 1 to 4 tokens, in a call of an empty row and of tokens without one, with calls of one row."""
    shape = RecurrenceShape.of(SIZES, Phase.VERIFY, Dtype.FP16, Dtype.FP32, TokenRows.LE_16)
    generator = torch.Generator().manual_seed(2)
    weights = drawn_weights(shape, generator, CPU)
    firsts, lengths = (0, 14, 61, 33, 64), (3, 4, 4, 1, 2)
    begun = recurrence_slots(shape, weights, len(firsts), 3, CPU)
    parts = []
    for slot, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        tokens = drawn_tokens(shape, Content.PLAIN, first + length, weights, generator)
        for begin in range(0, first, 4):  # the last step leaves the chunk before token 64 unfolded
            own = tuple(it[begin : min(begin + 4, first)] for it in tokens)
            begun.call(run_for_hopper, [Part(own, begin, slot if begin else begun.zero, slot)])
        own = tuple(it[first:] for it in tokens)
        parts.append(Part(own, first, slot if first else begun.zero, slot, folded=0))
    together, alone = (recurrence_slots(shape, weights, len(firsts), 3, CPU) for _ in range(2))
    for slots in (together, alone):
        for mine, given in zip(slots.tensors, begun.tensors, strict=True):
            mine.copy_(given)
    given = together.given(parts)
    fields = ("starts", "stops", "firsts", "folded", "sources", "targets")
    rows = replace(given.rows, **{name: getattr(given.rows, name)[:-1] for name in fields})  # the last token has none
    out = torch.full((given.tokens[0].shape[0], SIZES.num_value_heads, SIZES.value_dim), torch.nan).half()
    run_for_hopper(*given.tokens, weights, rows, together.state, out)
    assert not out[-1].any()
    for part, found in zip(parts, out[:-1].split(list(given.lengths)), strict=True):
        [expected] = alone.call(run_for_hopper, [part])
        assert torch.equal(found, expected)
    for mine, other in zip(together.tensors, alone.tensors, strict=True):
        assert torch.equal(mine[: len(parts)].nan_to_num(9.0), other[: len(parts)].nan_to_num(9.0))
