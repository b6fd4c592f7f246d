"""Known keys of config.json, in three kinds: read, without effect on what is computed, and refused.

Each family adds its own in the file of its reader. A key that no list has is no error, since files carry notes of their
makers; the start names it in a warning.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qualification.model.fields import Fields


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one family's config.json.

    read            used, or refused where the value is not supported
    without_effect  of training, of generation, or notes: they change no logit
    refused         key -> values that change nothing; any other value is refused
    """

    read: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def check(self, values: Mapping[str, object], source: str) -> None:
        """Raise ModelConfigError for a refused key."""
        for name, harmless in self.refused.items():
            if name in values and not any(type(values[name]) is type(it) and values[name] == it for it in harmless):
                same = " or ".join(("absent", *(str(it).lower() for it in harmless if it is not None)))
                Fields(values, source).refuse(name, f"{same} (what it asks for is not supported for this family)")

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that are in none of the lists."""
        known = self.read | self.without_effect | self.refused.keys()
        return [name for name in names if name not in known]


def family_keys(
    read: str = "", *, without_effect: str = "", refused: Mapping[str, tuple[object, ...]] | None = None
) -> Keys:
    """Return a family's keys: those that all have, and its own, as names between blanks.

    without_effect  also of those that other families read
    """
    own = refused or {}
    taken, idle = frozenset(read.split()), frozenset(without_effect.split())
    return Keys(
        (frozenset(_READ.split()) - idle | taken) - own.keys(),
        (frozenset(_WITHOUT_EFFECT.split()) | idle) - taken - own.keys(),
        {name: it for name, it in {**_REFUSED, **own}.items() if name not in taken},
    )


# What Llama's class reads and older ones do not.
UNREAD_BY_OLDER = """
    head_dim num_key_value_heads rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor
    original_max_position_embeddings intermediate_size hidden_act
"""
# Every family reads from the past to the future: what turns that off asks for other vectors.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "is_causal": (True,),  # null is false in transformers
    "use_bidirectional_attention": (False, None),
    "use_bidirectional": (False, None),
    "is_bidirectional": (False, None),
    "bidirectional": (False, None),
    "bidirectional_attention": (False, None),
    "compression_config": (None,),  # the older name of quantization_config
}
_READ = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id
    eos_token_id dtype torch_dtype rope_theta rope_scaling rope_parameters partial_rotary_factor
    original_max_position_embeddings quantization_config is_matryoshka matryoshka_dimensions
"""
# Of every file that transformers has written, its versions before 5 included; of generation, which
# generation_config.json holds since; and notes of tools.
_WITHOUT_EFFECT = """
    _name_or_path transformers_version auto_map _attn_implementation attn_implementation _attn_implementation_autoset
    _commit_hash return_dict output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss
    pruned_heads chunk_size_feed_forward is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder finetuning_task id2label label2id num_labels problem_type tokenizer_class prefix
    task_specific_params use_cache cache_implementation pad_token_id sep_token_id decoder_start_token_id
    initializer_range attention_dropout classifier_dropout pretraining_tp gradient_checkpointing _flash_attn_2_enabled
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    unsloth_fixed unsloth_version transformers.js_config is_llama_config rope_interleaved max_sequence_length
"""
