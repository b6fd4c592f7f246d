"""The definition of sampling beside the sampler: right tokens hold, and those of other parameters do not."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from kernels.sampling.gumbel import gumbel_noise
from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import RowSampling, sample, sampling_tensors
from qualification.model.forward.choice import Place, is_log_probability, may_be_chosen, noise
from server.protocol.messages import SamplingParams

CPU = torch.device("cpu")
VOCAB = 97


def drawn(rng: Random) -> tuple[Tensor, SamplingParams, Place]:
    wanted = SamplingParams(
        max_tokens=9,
        temperature=rng.choice((0.0, 0.4, 1.0, 1.7)),
        top_k=rng.choice((None, 1, 5, 40)),
        top_p=rng.choice((1.0, 0.9, 0.3)),
        min_p=rng.choice((0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 1.5)),
        logit_bias=rng.choice(((), ((3, 5.0), (7, -4.0)))),
        allowed_token_ids=rng.choice(((), (), (1, 2, 3, 9))),
    )
    prompt, answer = ([rng.randrange(VOCAB) for _ in range(num)] for num in (20, rng.randrange(9)))
    logits = torch.tensor([[rng.gauss(0, rng.choice((0.5, 2, 8))) for _ in range(VOCAB)]])
    return logits, wanted, Place(prompt, answer, rng.randrange(-(2**63), 2**63))


def chosen(logits: Tensor, wanted: SamplingParams, place: Place) -> int:
    penalties = RowPenalties(
        place.prompt, place.answer, wanted.repetition_penalty, wanted.presence_penalty, wanted.frequency_penalty
    )
    row = RowSampling(
        temperature=wanted.temperature, top_k=wanted.top_k, top_p=wanted.top_p, min_p=wanted.min_p, seed=place.seed,
        position=place.position, penalties=penalties, bias=wanted.logit_bias, allowed_ids=wanted.allowed_token_ids,
    )  # fmt: skip
    return int(sample(logits.clone(), sampling_tensors([row], VOCAB, CPU)).token_ids)


def test_a_samplers_token_is_one_that_may_be_chosen() -> None:
    rng = Random(1)
    for _ in range(200):
        logits, wanted, place = drawn(rng)
        token_id = chosen(logits, wanted, place)
        assert may_be_chosen(logits[0], token_id, wanted, place), wanted
        assert not may_be_chosen(logits[0], (token_id + 1) % VOCAB, wanted, place), wanted


def test_a_token_of_another_seed_or_place_is_refused() -> None:
    rng = Random(2)
    num_refused = 0
    for _ in range(100):
        logits, _, place = drawn(rng)
        wanted = SamplingParams(max_tokens=9, temperature=1.7)
        token_id = chosen(logits / 8, wanted, place)
        num_refused += not may_be_chosen(logits[0] / 8, token_id, wanted, replace(place, seed=place.seed ^ 1))
    assert num_refused > 80


@pytest.mark.parametrize("seed", [0, -3, 2**40 + 7, -(2**62)])
def test_noise_is_that_of_the_sampler(seed: int) -> None:
    served = gumbel_noise(torch.tensor([seed]), torch.tensor([77]), 5000)[0].double()
    assert (served - noise(seed, 77, 5000, CPU)).abs().max() < 1e-6


def test_a_log_probability_that_is_off_is_refused() -> None:
    logits, _, _ = drawn(Random(3))
    right = float(logits[0].log_softmax(0)[5])
    assert is_log_probability(right, logits[0], 5)
    assert not is_log_probability(right + 0.001, logits[0], 5)
