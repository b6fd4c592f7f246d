"""Sampling that the model's authors recommend in generation_config.json, for requests that do not say otherwise."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from server.errors import ModelError
from server.model.load.json_file import read_object

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Of requests too. A penalty near 0 turns any logit into an infinity; a penalty below this has no use.
LEAST_REPETITION_PENALTY = 0.01


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults of optional fields; OpenAI's own where the file says nothing.

    eos_token_id is read with config.json. Other keys are not read, and `do_sample` is among those,
    as in vLLM: it is the caller's, who asks for greedy answers by temperature 0.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=10)] | None = None


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read the defaults; all are None where the model has no such file. Raises ModelError with file and value."""
    path = folder / FILE
    if not path.is_file():
        return SamplingDefaults()
    values = read_object(path)
    top_k = values.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        values["top_k"] = int(top_k)
    try:
        defaults = msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error
    if not_read := keys_not_read(values):
        logger.warning("%s: not read: %s; what a request asks for is what it gets", path, ", ".join(not_read))
    return defaults


def keys_not_read(values: Mapping[str, object]) -> list[str]:
    """Return the keys by which transformers would write other answers than the server, and those that are not known."""
    known = {*SamplingDefaults.__struct_fields__, *_WITHOUT_EFFECT.split()}
    return [
        name
        for name, value in values.items()
        if name not in known and value is not None and value not in _NEUTRAL.get(name, ())
    ]


# Of transformers' generation, each with the values by which it changes nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "early_stopping": (False,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "num_return_sequences": (1,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False, True),
}
# Read elsewhere, or no part of how a server answers.
_WITHOUT_EFFECT = """
    eos_token_id bos_token_id pad_token_id decoder_start_token_id transformers_version _from_model_config do_sample
    max_length max_time use_cache cache_implementation cache_config return_legacy_cache return_dict_in_generate
    output_attentions output_hidden_states output_logits output_scores generation_kwargs compile_config
    disable_compile low_memory prompt_lookup_num_tokens max_matching_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    target_lookbehind is_assistant prefill_chunk_size chat_format max_window_size continuous_batching_config
    use_mtp max_cache_len assistant_ensemble_weight speculation_type
"""
