"""Models that also see images and whose text part is a family of its own: what their checkpoints hold beside it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from qualification.model.config import AttentionConfig, ModelConfig
from qualification.model.families.ernie4_5_vl_moe import FIRST_PUBLISHED
from qualification.model.fields import Fields
from qualification.model.keys import Keys, family_keys


class ImageSpans(Enum):
    """Layers of the text in which an image's tokens see each other both ways."""

    NONE = "none"
    ALL = "all"
    WINDOWED = "those with a window, where the text's `use_bidirectional_attention` is vision"


@dataclass(frozen=True, slots=True)
class ImageModel:
    """model_type, architectures   as in config.json
    text        the key of config.json that has the text part's fields
    families    model_types of the text part that are known
    text_chooses      whether model_type in `text` says which of them, the first where it says nothing; else it is the
                      first, whatever `text` calls itself
    renamed     beginnings of the text part's names -> those of a checkpoint of text alone; the first that fits
    of_images   beginnings of the names of all other parts
    keys        that are known beside `text`
    refused_in_text   of the text part's keys, those that are refused with images and not in a model of text alone
    ties_embeddings   tie_word_embeddings where the whole's is missing; None: as the text part has it
    spans       layers of the text part in which an image's tokens see each other both ways
    missing_spans     the text's `use_bidirectional_attention` where it is missing
    """

    model_type: str
    architectures: tuple[str, ...]
    families: tuple[str, ...]
    renamed: Mapping[str, str]
    of_images: tuple[str, ...]
    keys: Keys
    refused_in_text: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    text_chooses: bool = False
    ties_embeddings: bool | None = None
    spans: ImageSpans = ImageSpans.NONE
    missing_spans: str | None = None
    text: str = "text_config"

    def text_family(self, config: Mapping[str, object], source: str) -> str:
        """Return the model_type of the text part of a parsed config.json. Raises ModelConfigError."""
        text = config.get(self.text)
        if not self.text_chooses or not isinstance(text, Mapping):
            return self.families[0]
        return Fields(text, f"{source}, {self.text}").choice("model_type", self.families, self.families[0])


_BOTH_WAYS = "use_bidirectional_attention"
# Both ways of writing: the public files' own, and that of classes which have one model for all parts.
_RENAMED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_TOWER = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_VISUAL = ("visual.", "model.visual.")
_TOWERS_OF_GEMMA_4 = (
    "model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "model.vision_embedder.",
)  # fmt: skip
_TOWERS_OF_DEEPSEEK = (
    "model.sam_model.", "model.vision_model.", "model.qwen2_model.", "model.projector.", "model.image_newline",
    "model.view_seperator", "model.vision_tower.", "model.multi_modal_projector.", "model.view_separator",
)  # fmt: skip
# Beside the text of a Nemotron: keys of its class in transformers, then those of the published files.
_BESIDE_NEMOTRON = (
    "audio_config downsample_ratio force_image_size projector_hidden_size vision_hidden_size image_token_id "
    "video_token_id audio_token_id video_pruning_rate video_temporal_patch_size "
    "sound_config vit_hidden_size img_context_token_id video_context_token_id sound_context_token_id img_context_token "
    "video_context_token sound_context_token img_start_token img_end_token image_tag_type max_sequence_length "
    "norm_mean norm_std patch_size ps_version template use_thumbnail attn_implementation"
)
_NEMOTRON_OMNI = ("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3")
_TOWERS_OF_NEMOTRON = (
    "vision_model.", "vision_final_layernorm.", "mlp1.", "multi_modal_projector.", "sound_encoder.",
    "sound_projection.", "audio_tower.", "embed_audio.",
)  # fmt: skip
_TEXTS_OF_INTERNVL = ("qwen2", "qwen3", "qwen3_moe", "gpt_oss", "llama")
IMAGE_MODELS: tuple[ImageModel, ...] = (
    ImageModel(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        ("gemma3_text",),
        _RENAMED,
        _TOWER,
        family_keys(
            "text_config vision_config mm_tokens_per_image",
            without_effect="image_token_index image_token_id boi_token_index boi_token_id eoi_token_index eoi_token_id",
        ),
        {"final_logit_softcapping": (None,)},  # the class of all parts does not apply it
        spans=ImageSpans.ALL,
    ),
    *(
        ImageModel(
            model_type,
            (architecture,),
            (f"{model_type}_text",),
            _RENAMED,
            _TOWERS_OF_GEMMA_4,
            family_keys(
                "text_config vision_config audio_config",
                without_effect="boi_token_id eoi_token_id image_token_id video_token_id boa_token_id eoa_token_id "
                "eoa_token_index audio_token_id vision_soft_tokens_per_image",
            ),
            ties_embeddings=True,
            spans=ImageSpans.WINDOWED,
            missing_spans=missing_spans,
        )
        for model_type, architecture, missing_spans in (
            ("gemma4", "Gemma4ForConditionalGeneration", None),
            ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "vision"),
        )
    ),
    *(
        ImageModel(
            model_type,
            (architecture,),
            (f"{model_type}_text",),
            _RENAMED,
            _VISUAL,
            family_keys(
                "text_config vision_config",
                without_effect=f"image_token_id video_token_id vision_start_token_id vision_end_token_id {another}",
            ),
        )
        for model_type, architecture, another in (
            ("qwen2_vl", "Qwen2VLForConditionalGeneration", "vision_token_id"),
            ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "vision_token_id"),
            ("qwen3_vl", "Qwen3VLForConditionalGeneration", ""),
            ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", ""),
        )
    ),
    *(
        ImageModel(
            model_type,
            (architecture,),
            families,
            _RENAMED,
            _VISUAL,
            family_keys(
                "text_config vision_config",
                without_effect="image_token_id video_token_id image_start_token_id image_end_token_id "
                "video_start_token_id video_end_token_id",
            ),
            text_chooses=len(families) > 1,
        )
        for model_type, architecture, families in (
            ("glm4v", "Glm4vForConditionalGeneration", ("glm4v_text",)),
            ("glm4v_moe", "Glm4vMoeForConditionalGeneration", ("glm4v_moe_text",)),
            ("glm_ocr", "GlmOcrForConditionalGeneration", ("glm_ocr_text",)),
            ("glm46v", "Glm46VForConditionalGeneration", ("glm4v_text", "glm4v_moe_text")),
        )
    ),
    *(
        ImageModel(
            model_type,
            (f"{prefix}ForConditionalGeneration", f"{prefix}ForCausalLM"),  # the latter without the parts of images
            (f"{model_type}_text",),
            _RENAMED,
            _VISUAL,
            family_keys(
                "text_config vision_config",
                without_effect="image_token_id video_token_id vision_start_token_id vision_end_token_id "
                "language_model_only",
            ),
        )
        for model_type, prefix in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
    ),
    ImageModel(
        "paddleocr_vl",
        ("PaddleOCRVLForConditionalGeneration",),
        ("paddleocr_vl_text",),
        _RENAMED,
        ("visual.", "mlp_AR.", "model.visual.", "model.projector."),
        family_keys(
            "text_config vision_config",
            without_effect="image_token_id video_token_id vision_start_token_id vision_end_token_id",
        ),
        ties_embeddings=True,
    ),
    *(
        ImageModel(
            model_type,
            ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
            ("ernie4_5_vl_moe_text",),
            _RENAMED,
            ("vision_model.", "model.vision_model.", "model.vision_tower.", "model.resampler_model."),
            family_keys("text_config vision_config", without_effect=without_effect),
            ties_embeddings=True,
        )
        for model_type, without_effect in (
            (
                "ernie4_5_vl_moe",
                "image_start_token_id image_end_token_id image_token_id video_start_token_id video_end_token_id "
                "video_token_id",
            ),
            (
                FIRST_PUBLISHED,
                "im_patch_id pixel_hidden_size modality_detach temporal_conv_size spatial_conv_size mm_vocab_size "
                "max_text_id use_temporal_conv resampler_fuse_rms_norm use_recompute_resampler",
            ),
        )
    ),
    ImageModel(
        "lfm2_vl",
        ("Lfm2VlForConditionalGeneration",),
        ("lfm2",),
        _RENAMED,
        _TOWER,
        family_keys(
            "text_config vision_config",
            without_effect="image_token_id image_token_index projector_hidden_act projector_hidden_size projector_bias "
            "projector_use_layernorm downsample_factor do_image_splitting encoder_patch_size max_image_tokens "
            "max_num_patches max_pixels_tolerance max_tiles min_image_tokens min_tiles tile_size "
            "use_image_special_tokens use_thumbnail vision_feature_layer",
            refused={"tie_embedding": (True, None)},
        ),
        {"tie_embedding": (True, None)},  # the class of all parts ties the head by its own field
        ties_embeddings=True,
    ),
    ImageModel(
        "hunyuan_vl",
        ("HunYuanVLForConditionalGeneration",),
        ("hunyuan_vl_text",),
        _RENAMED,
        ("vit.", "model.vit.", "model.vision_tower."),
        family_keys("text_config vision_config", without_effect="image_token_id im_start_id im_end_id im_newline_id"),
        ties_embeddings=True,
    ),
    ImageModel(
        "deepseek_ocr2",
        ("DeepseekOcr2ForConditionalGeneration",),
        ("deepseek_ocr2_text",),
        _RENAMED,
        _TOWERS_OF_DEEPSEEK,
        family_keys("text_config vision_config", without_effect="image_token_id"),
        ties_embeddings=False,
    ),
    ImageModel(
        "deepseek_vl_v2",  # as DeepSeek writes DeepSeek-OCR
        ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"),
        ("deepseek_ocr2_text",),
        _RENAMED,
        _TOWERS_OF_DEEPSEEK,
        family_keys(
            "language_config vision_config",
            # Behind the first line: what the files say of the text once more, outside of its part.
            without_effect="candidate_resolutions global_view_pos projector_config tile_tag "
            "first_k_dense_replace kv_lora_rank lm_head moe_intermediate_size n_group n_routed_experts "
            "n_shared_experts num_experts_per_tok q_lora_rank qk_nope_head_dim qk_rope_head_dim rm_head topk_group "
            "topk_method use_mla v_head_dim",
            refused={"sliding_window": (None,), "sliding_window_size": (None,)},
        ),
        text="language_config",
    ),
    ImageModel(
        "minicpmv4_6",
        ("MiniCPMV4_6ForConditionalGeneration",),
        ("qwen3_5_text",),
        _RENAMED,
        ("vision_tower.", "merger.", "model.vision_tower.", "model.merger."),
        family_keys(
            "text_config vision_config",
            without_effect="image_token_id video_token_id image_size patch_size insert_layer_id downsample_mode "
            "drop_vision_last_layer merge_kernel_size merger_times",
        ),
        text_chooses=True,
        ties_embeddings=False,
    ),
    ImageModel(
        "kimi_k25",
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),  # as published, as transformers has it
        ("deepseek_v3", "kimi_k2"),
        _RENAMED,
        ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
        family_keys(
            "text_config vision_config",
            without_effect="image_token_id video_token_id vision_start_token_id vision_end_token_id "
            "media_placeholder_token_id video_placeholder use_unified_vision_chunk ignore_index "
            "projection_hidden_size projection_layer_norm_eps",
        ),
        text_chooses=True,
        ties_embeddings=True,
    ),
    ImageModel(
        "llama4",
        ("Llama4ForConditionalGeneration",),
        ("llama4_text",),
        _RENAMED,
        ("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."),
        family_keys(
            "text_config vision_config",
            without_effect="boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id image_token_id",
        ),
    ),
    ImageModel(
        "step3p7",
        ("Step3p7ForConditionalGeneration",),
        ("step3p5",),
        _RENAMED,
        ("vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector."),
        family_keys(
            "text_config vision_config",
            without_effect="image_token_id understand_projector_stride projector_bias im_end_token",
        ),
    ),
    ImageModel(
        "muse_glimmer",
        ("MuseGlimmerForConditionalGeneration",),
        ("muse_glimmer_text",),
        _RENAMED,
        ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
        family_keys(
            "text_config vision_config",
            without_effect="image_token_id video_token_id out_hidden_size projector_hidden_size projector_hidden_act",
        ),
    ),
    ImageModel(
        "mistral3",
        ("Mistral3ForConditionalGeneration",),
        ("mistral", "ministral3", "mistral4"),
        _RENAMED,
        _TOWER,
        family_keys(
            "text_config vision_config projector_hidden_act vision_feature_layer multimodal_projector_bias "
            "spatial_merge_size",
            without_effect="image_token_index image_token_id",
        ),
        text_chooses=True,
        ties_embeddings=True,
    ),
    ImageModel(
        "llava",  # of which Pixtral is one
        ("LlavaForConditionalGeneration",),
        ("mistral",),
        _RENAMED,
        _TOWER,
        family_keys(
            "text_config vision_config projector_hidden_act vision_feature_layer vision_feature_select_strategy "
            "multimodal_projector_bias",
            without_effect="image_token_index image_token_id image_seq_length ignore_index",
        ),
        text_chooses=True,
    ),
    *(
        ImageModel(
            model_type,
            (architecture,),
            _TEXTS_OF_INTERNVL,
            _RENAMED,
            _TOWER,
            family_keys(
                "text_config vision_config image_seq_length downsample_ratio projector_hidden_act vision_feature_layer "
                "vision_feature_select_strategy",
                without_effect="image_token_id",
            ),
            text_chooses=True,
            ties_embeddings=True,
        )
        for model_type, architecture in (
            ("internvl", "InternVLForConditionalGeneration"),
            ("interns1", "InternS1ForConditionalGeneration"),
        )
    ),
    ImageModel(
        "internvl_chat",  # as OpenGVLab writes InternVL
        ("InternVLChatModel",),
        _TEXTS_OF_INTERNVL,
        _RENAMED,
        ("vision_model.", "mlp1."),
        family_keys(
            "llm_config vision_config",
            without_effect="downsample_ratio dynamic_image_size force_image_size image_fold max_dynamic_patch "
            "min_dynamic_patch pad2square ps_version select_layer system_message template use_thumbnail",
            refused={"use_llm_lora": (0, None), "use_backbone_lora": (0, None)},  # tensors of adapters
        ),
        text_chooses=True,
        text="llm_config",
    ),
    *(
        ImageModel(
            model_type,
            architectures,
            ("nemotron_h",),
            {"language_model.": ""},
            _TOWERS_OF_NEMOTRON,
            family_keys(f"{text} vision_config", without_effect=_BESIDE_NEMOTRON),
            text=text,
        )
        for model_type, text, architectures in (
            ("nemotron_h_omni", "text_config", _NEMOTRON_OMNI),
            ("nemotron_h_omni", "llm_config", _NEMOTRON_OMNI),
            ("NemotronH_Nano_Omni_Reasoning_V3", "llm_config", _NEMOTRON_OMNI),
            ("NemotronH_Nano_VL_V2", "llm_config", ("NemotronH_Nano_VL_V2",)),
        )
    ),
)


def image_model_of(config: Mapping[str, object]) -> ImageModel | None:
    """Return which of them a parsed config.json is of; None for text alone, and for one that is not known.

    Of two of one model_type it is the one that has its text under a key that is there, else the first.
    """
    found = [model for model in IMAGE_MODELS if model.model_type == config.get("model_type")]
    return next((model for model in found if model.text in config), found[0] if found else None)


def text_section(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the fields of the text part of a parsed config.json; None where they are not apart."""
    image_model = image_model_of(config)
    text = config.get("text_config" if image_model is None else image_model.text)
    return text if isinstance(text, Mapping) else None


def with_image_spans(model: ModelConfig, config: Mapping[str, object]) -> ModelConfig:
    """Return the model of a parsed config.json with the layers in which an image's tokens see each other both ways."""
    image_model, text = image_model_of(config), text_section(config)
    if image_model is None or "vision_config" not in config:
        return model
    given = None if text is None else text.get(_BOTH_WAYS, image_model.missing_spans)
    is_causal = image_model.spans is ImageSpans.WINDOWED and given != "vision"
    return _with_spans(model, ImageSpans.NONE if is_causal else image_model.spans)


def without_image_spans(model: ModelConfig) -> ModelConfig:
    """Return the model as it computes prompts without images."""
    return _with_spans(model, ImageSpans.NONE)


def _with_spans(model: ModelConfig, spans: ImageSpans) -> ModelConfig:
    layers = []
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionConfig):
            sees = spans is ImageSpans.ALL or (spans is ImageSpans.WINDOWED and mixer.window is not None)
            mixer = replace(mixer, sees_spans=sees)
        layers.append(replace(layer, mixer=mixer))
    return replace(model, layers=tuple(layers))


def text_names(names: Iterable[str], family: str) -> dict[str, str]:
    """A checkpoint's name of each tensor of the text part -> its name in a checkpoint of text alone.

    family   the text part's
    """
    models = [model for model in IMAGE_MODELS if family in model.families]
    of_images = tuple(prefix for model in models for prefix in model.of_images)
    renamed = {old: new for model in models for old, new in model.renamed.items()}
    found = {}
    for name in names:
        if not name.startswith(of_images):
            old = next((prefix for prefix in renamed if name.startswith(prefix)), "")
            found[name] = renamed.get(old, "") + name.removeprefix(old)
    return found
