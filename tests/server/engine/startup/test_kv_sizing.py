"""Pages of the KV cache, and the messages of a start where these are too few or bound a request."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Policy
from qualification.model.config import RecurrenceConfig, StateTensor, state_bytes, weight_bytes
from qualification.model.families.reader import read_model
from server.engine.startup.kv_sizing import check_sequences_fit, check_weights_fit, device_bytes, num_pages
from server.engine.startup.limits import choose_limits
from server.engine.startup.state_sizing import state_slots, with_state_slots, with_states_of
from server.errors import ModelError, SettingsError
from server.model.load.load import load_config
from server.protocol.messages import StateSlots
from server.settings import DeviceChoice, DtypeChoice, Settings
from support.engine.built_engine import built_engine
from support.engine.one_operator import HYBRID
from support.models.tiny_llama import TinyLlama

CPU = torch.device("cpu")


def pages_of(model: TinyLlama, **given: int) -> int:
    settings = Settings(model=str(model.folder), page_size=given.pop("page_size", 16), **given)
    config = replace(load_config(model.folder), max_position=512)
    limits = choose_limits(settings, config, CPU)
    return num_pages(settings, config, limits, CPU, sizes=None, small_runner=lambda: pytest.fail("this is no GPU"))


def test_a_cache_that_holds_no_request_is_refused_by_its_flag(tiny_llama: TinyLlama) -> None:
    said = r"^--kv-cache-tokens 10 gives room for 0 tokens, in pages of 16: at least 16 are needed, 512 for the model's"
    with pytest.raises(SettingsError, match=said):
        pages_of(tiny_llama, kv_cache_tokens=10)
    assert pages_of(tiny_llama, kv_cache_tokens=16) == 1
    said = "^--kv-cache-tokens 100 gives room for 96 tokens, in pages of 16: --max-model-len needs 97$"
    with pytest.raises(SettingsError, match=said):
        pages_of(tiny_llama, kv_cache_tokens=100, max_model_len=97)
    assert pages_of(tiny_llama, kv_cache_tokens=100, max_model_len=96) == 6


def test_more_sequences_than_the_memory_has_logits_for_are_refused(tiny_llama: TinyLlama) -> None:
    config = load_config(tiny_llama.folder)
    most = device_bytes(CPU) // (4 * config.vocab_size)
    for num_seqs in (most, most + 1, 2**63 - 1):
        limits = choose_limits(Settings(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs), config, CPU)
        if num_seqs == most:
            check_sequences_fit(config, limits, CPU)
            continue
        with pytest.raises(
            SettingsError, match=rf"max_num_seqs is {num_seqs}: logits of so many sequences take .* GiB, "
        ):
            check_sequences_fit(config, limits, CPU)


def test_only_recurrent_layers_get_slots_of_states(tiny_llama: TinyLlama) -> None:
    config = load_config(tiny_llama.folder)
    for given, slots in (({}, (10, 5)), ({"state_snapshots": 3}, (8, 3))):
        settings = Settings(device=DeviceChoice.CPU, max_num_seqs=5, **given)
        limits = choose_limits(settings, config, CPU)
        assert state_slots(config, limits) is None
        mixer = RecurrenceConfig("sums", (StateTensor((7,), Dtype.FP32),))
        hybrid = replace(config, layers=(replace(config.layers[0], mixer=mixer),) * 3)
        found = state_slots(hybrid, with_state_slots(settings, hybrid, limits, CPU))
        assert found == StateSlots(*slots, 3 * 7 * 4)


@pytest.mark.parametrize(
    ("given", "share", "num_seqs", "snapshots"),  # `share`: of the memory, that one state takes
    [
        ({}, 1 / 100, 16, 16),
        ({}, 1 / 60, 16, 14),  # of half of the memory
        ({}, 1 / 12, 6, 0),
        ({}, 2, 1, None),
        ({"state_snapshots": 4}, 1 / 24, 8, 4),
        ({"max_num_seqs": 8}, 1 / 12, 8, 0),
        ({"max_num_seqs": 14}, 1 / 12, 14, None),
        ({"max_num_seqs": 8, "state_snapshots": 5}, 1 / 12, 8, None),
    ],
)
def test_states_are_as_many_as_the_memory_takes(
    tiny_llama: TinyLlama, given: dict[str, int], share: float, num_seqs: int, snapshots: int | None
) -> None:
    plain = load_config(tiny_llama.folder)
    settings = Settings(device=DeviceChoice.CPU, **given)
    limits = choose_limits(settings, plain, CPU)
    numbers = int(0.99 * share * (device_bytes(CPU) - weight_bytes(plain, limits.dtype)) / 4)
    mixer = RecurrenceConfig("sums", (StateTensor((numbers,), Dtype.FP32),))
    config = replace(plain, layers=(replace(plain.layers[0], mixer=mixer), *plain.layers))
    if snapshots is None:
        with pytest.raises(
            SettingsError, match=rf"^{num_seqs} sequences that run at once and \d snapshots need \d+ states"
        ):
            with_state_slots(settings, config, limits, CPU)
    else:
        found = with_state_slots(settings, config, limits, CPU)
        assert (found.max_num_seqs, found.state_snapshots) == (num_seqs, snapshots)


def test_copies_of_states_that_a_model_lacks_are_refused(tiny_llama: TinyLlama) -> None:
    plain = load_config(tiny_llama.folder)
    limits = choose_limits(Settings(), plain, CPU)
    assert with_state_slots(Settings(), plain, limits, CPU) is limits
    with pytest.raises(SettingsError, match="--state-snapshots is 4: no layer of the model keeps states, leave it out"):
        with_state_slots(Settings(state_snapshots=4), plain, limits, CPU)


def test_states_have_the_dtype_that_is_asked_for(tiny_llama: TinyLlama) -> None:
    hybrid = read_model(HYBRID)
    found = with_states_of(Settings(mamba_ssm_cache_dtype=DtypeChoice.BF16), hybrid)
    assert state_bytes(hybrid, Dtype.FP32) - state_bytes(found, Dtype.FP32) == 2 * 2 * (2 * 8 * 16)  # of 2 layers
    assert with_states_of(Settings(mamba_ssm_cache_dtype=DtypeChoice.FP32), found) == hybrid
    assert with_states_of(Settings(), found) is found
    for choice, model, said in (
        (DtypeChoice.FP16, hybrid, "--mamba-ssm-cache-dtype is fp16: states are kept in fp32 or bf16"),
        (DtypeChoice.BF16, load_config(tiny_llama.folder), "--mamba-ssm-cache-dtype is bf16: no layer of the model"),
    ):
        with pytest.raises(SettingsError, match=f"^{said}"):
            with_states_of(Settings(mamba_ssm_cache_dtype=choice), model)


def test_weights_beyond_the_memory_are_refused_unloaded(tiny_llama: TinyLlama) -> None:
    config = replace(load_config(tiny_llama.folder), vocab_size=2**31 - 1, hidden_size=2**20)
    limits = choose_limits(Settings(device=DeviceChoice.CPU), config, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"weights in fp32 .* take 16777220\.5 GiB, the device has .* smaller model"):
        check_weights_fit(config, limits, torch.device("cpu"))


def test_a_cache_of_one_token_is_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(SettingsError, match="room for 1 tokens, in pages of 1: at least 2 are needed"):
        pages_of(tiny_llama, kv_cache_tokens=1, page_size=1)


@pytest.mark.parametrize(
    ("given", "max_model_len", "is_bound"),
    [
        ({"kv_cache_tokens": 64}, 64, True),
        ({"kv_cache_tokens": 64, "max_model_len": 64}, 64, False),
        ({"kv_cache_tokens": 256}, 256, False),  # the model's own limit
        ({}, 256, False),
    ],
)
def test_a_start_knows_whether_the_cache_bounds_a_request(
    tiny_llama: TinyLlama, tmp_path: Path, given: dict[str, int], max_model_len: int, is_bound: bool
) -> None:
    settings = Settings(
        model=str(tiny_llama.folder),
        device=DeviceChoice.CPU,
        on_unproven=Policy.DEGRADE,
        cache_dir=str(tmp_path),
        attestation_interval_s=0,
        **given,
    )
    ready = built_engine(settings).ready
    assert (ready.max_model_len, ready.is_bound_by_cache) == (max_model_len, is_bound)
