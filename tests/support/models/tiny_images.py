"""Small models that see images, with random weights and a tokenizer: folders that a server starts with.

python tests/support/models/tiny_images.py FOLDER [KIND]      for a server that is tried by hand
"""

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path

import msgspec
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel

from server.protocol.images import PromptImage

DEMO = Path(__file__).parents[3] / "server" / "model" / "demo"
START, END, IMAGE = 4096, 4097, 4098  # ids of the tokens around an image, and of its own
VOCAB_SIZE = 4099
_ADDED = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_ADDED_OF_INTERN = ("<img>", "</img>", "<IMG_CONTEXT>")
_ADDED_OF_MISTRAL = ("[IMG_BREAK]", "[IMG_END]", "[IMG]")  # the first one between the rows of an image
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 4,
    "pad_token_id": 0,
}
_SECTIONS: dict[str, object] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_IN_SECTIONS: dict[str, object] = {"rope_parameters": _SECTIONS}
_INTERLEAVED: dict[str, object] = {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}}
_TOWER: dict[str, object] = {
    "depth": 4,
    "hidden_size": 48,
    "num_heads": 4,
    "intermediate_size": 60,
    "out_hidden_size": 64,
}
_TOWER_3: dict[str, object] = {**_TOWER, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36}
# Windows of 4 patches a side: an image of a few patches has several, and others that are cut off.
_TOWER_2_5: dict[str, object] = {**_TOWER, "window_size": 56, "fullatt_block_indexes": [1, 3]}
# A square of 5 points a side, within images of more patches a side and of fewer.
_TOWER_GLM: dict[str, object] = {**_TOWER, "image_size": 70, "rms_norm_eps": 1e-5}
_PARTLY: dict[str, object] = {
    "rope_parameters": {**_SECTIONS, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
}
SIDE = 6  # patches of each image of Gemma, and of each tile of InternVL, of which 2 x 2 are a token
_INTERN: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "patch_size": [14, 14],
    "image_size": [SIDE * 14, SIDE * 14],
    "attention_bias": True,
}
# A square of 5 points a side, as GLM's.
_PADDLE: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "image_size": 70,
}
_PIXTRAL: dict[str, object] = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "patch_size": 14,
    "hidden_act": "silu",
}
_GEMMA_4_TEXT: dict[str, object] = {
    "num_hidden_layers": 4,
    "global_head_dim": 16,
    "sliding_window": 512,  # longer than all prompts: sessions' attention has no window
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
}
_GEMMA_4: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "intermediate_size": 60,
    "patch_size": 14,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
    "use_clipped_linears": True,
    "standardize": True,
}
_EXPERTS: dict[str, object] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_RECURRENT: dict[str, object] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_WINDOWS: dict[str, object] = {
    "sliding_window": 7,  # fewer than the tokens of an image
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
_SIGLIP: dict[str, object] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "patch_size": 14,
    "image_size": SIDE * 14,
    "vision_use_head": False,
}
# Windows shorter than an image, whose tokens see each other in these layers alone.
_GEMMA_4_LARGE: dict[str, object] = {
    **{name: value for name, value in _GEMMA_4_TEXT.items() if name != "num_kv_shared_layers"},
    "hidden_size_per_layer_input": 0,
    "sliding_window": 7,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_GEMMA_4_UNIFIED: dict[str, object] = {
    "patch_size": 7,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 48,
    "mm_posemb_size": 16,
    "output_proj_dims": 48,
}
PIXTRAL = "llava, pixtral"
GEMMA, GEMMA_4_LARGE, GEMMA_4_UNIFIED = "gemma 3", "gemma 4, both ways", "gemma 4, unified"
KINDS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {  # model_type, text, tower
    "qwen2 vl": (
        "qwen2_vl",
        _IN_SECTIONS,
        {"depth": 4, "embed_dim": 48, "num_heads": 4, "mlp_ratio": 3, "hidden_size": 64},
    ),
    "qwen2.5 vl": ("qwen2_5_vl", _IN_SECTIONS, _TOWER_2_5),
    "qwen3 vl": ("qwen3_vl", _INTERLEAVED, _TOWER_3),
    "qwen3 vl, moe": (
        "qwen3_vl_moe",
        {**_INTERLEAVED, **_EXPERTS},
        _TOWER_3,
    ),
    "qwen3.5, moe": (
        "qwen3_5_moe",
        {**_RECURRENT, **_EXPERTS, "shared_expert_intermediate_size": 24},
        {**_TOWER, "num_position_embeddings": 36},
    ),
    "glm4v": ("glm4v", _PARTLY, _TOWER_GLM),
    "glm4v, moe": (
        "glm4v_moe",
        {**_PARTLY, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        _TOWER_GLM,
    ),
    "glm46v": (
        "glm46v",
        {**_PARTLY, "model_type": "glm4v_text"},
        {**_TOWER_GLM, "model_type": "glm4v_vision"},
    ),
    "glm ocr": ("glm_ocr", {**_IN_SECTIONS, "head_dim": 16}, _TOWER_GLM),
    "paddleocr vl": ("paddleocr_vl", _IN_SECTIONS, _PADDLE),
    "internvl": ("internvl", {"model_type": "qwen3"}, _INTERN),
    "internvl, large": (
        "internvl",
        {"model_type": "qwen3"},
        {**_INTERN, "attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"},
    ),
    "mistral 3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL,
    ),
    PIXTRAL: ("llava", {"model_type": "mistral", "sliding_window": None}, _PIXTRAL),
    GEMMA: ("gemma3", _WINDOWS, _SIGLIP),
    "gemma 4": ("gemma4", _GEMMA_4_TEXT, _GEMMA_4),
    GEMMA_4_LARGE: ("gemma4", _GEMMA_4_LARGE, _GEMMA_4),
    GEMMA_4_UNIFIED: (
        "gemma4_unified",
        {
            **{name: it for name, it in _GEMMA_4_TEXT.items() if name != "num_kv_shared_layers"},
            "hidden_size_per_layer_input": 0,
            "sliding_window": 7,
        },
        _GEMMA_4_UNIFIED,
    ),
}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def save_tiny(folder: Path, kind: str = "qwen2.5 vl") -> PreTrainedModel:
    """Save a model with its tokenizer and the settings of its images; return transformers' model, in fp32."""
    model_type, text, tower = KINDS[kind]
    config_class = CONFIG_MAPPING[model_type]
    torch.manual_seed(0)
    own: dict[str, object] = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    if kind == "mistral 3":
        own = {"image_token_index": IMAGE, "vision_feature_layer": -2}
    if kind == PIXTRAL:
        own = {"image_token_index": IMAGE, "vision_feature_select_strategy": "full"}
    if kind.startswith("internvl"):
        own = {"image_token_id": IMAGE, "image_seq_length": (SIDE // 2) ** 2}
    if kind == GEMMA:
        own = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 9}
    if kind.startswith("gemma 4"):
        own = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "audio_config": None}
    config = config_class(text_config={**_TEXT, **text}, vision_config=tower, tie_word_embeddings=False, **own)
    model: PreTrainedModel = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class](config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                "embed_vision" in name or "lambda_" in name or parameter.dim() > 1
            ):  # a random model whose answers depend on what an image shows
                parameter.normal_(0, 0.15)
            elif kind == "paddleocr vl":  # two norms, one behind the other, which ones would make one
                parameter.uniform_(0.5, 1.5)
        for name, bound in model.named_buffers():
            if name.endswith((".input_min", ".output_min", ".input_max", ".output_max")):
                bound.copy_((-1 if name.endswith("min") else 1) * (1 + torch.rand(())))
            elif "std_" in name:
                bound.normal_(1, 0.2)
    model.save_pretrained(folder)
    if kind.startswith("gemma 4"):
        _save_tokenizer(folder, _ADDED, _TEMPLATE.replace("".join(_ADDED[i] for i in (0, 2, 1)), _ADDED[2]))
        of_images = {
            "patch_size": 7 if kind == GEMMA_4_UNIFIED else 14,
            "pooling_kernel_size": 2,
            "do_normalize": False,
            "max_soft_tokens": 70,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(of_images))
        return model
    if kind.startswith("internvl"):
        _save_tokenizer(
            folder, _ADDED_OF_INTERN, _TEMPLATE.replace("".join(_ADDED[i] for i in (0, 2, 1)), "<IMG_CONTEXT>")
        )
        given = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": SIDE * 14, "width": SIDE * 14}}
        (folder / "preprocessor_config.json").write_text(json.dumps(given))
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": (SIDE // 2) ** 2}))
        return model
    if kind in ("mistral 3", PIXTRAL):
        _save_tokenizer(folder, _ADDED_OF_MISTRAL, _TEMPLATE.replace("".join(_ADDED[i] for i in (0, 2, 1)), "[IMG]"))
        size = {"size": {"longest_edge": 1540}, "image_processor_type": "PixtralImageProcessor"}
        (folder / "preprocessor_config.json").write_text(json.dumps(size))
        return model
    if kind == GEMMA:
        _save_tokenizer(folder, _ADDED, _TEMPLATE.replace("<|image_pad|><|vision_end|>", ""))
        given = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE * 14, "width": SIDE * 14}}
        (folder / "preprocessor_config.json").write_text(json.dumps(given))
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 9}))
        return model
    _save_tokenizer(folder, _ADDED, _TEMPLATE)
    is_qwen_3 = kind.startswith("qwen3")
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor" if is_qwen_3 else "Qwen2_5_VLProcessor",
        "patch_size": 16 if is_qwen_3 else 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5] if is_qwen_3 else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if is_qwen_3 else [0.26862954, 0.26130258, 0.27577711],
        "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def _save_tokenizer(folder: Path, names: tuple[str, ...], template: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_demo = json.loads((DEMO / "tokenizer_config.json").read_text())
    added = {str(START + index): {"content": name, "special": True} for index, name in enumerate(names)}
    of_demo["added_tokens_decoder"] |= added
    of_demo["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(of_demo))
    shutil.copy(DEMO / "generation_config.json", folder)


def prompt_of(*parts: int | PromptImage) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the token ids of a prompt of token ids and images in their order, and the images in their places."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        ids.append(START)
        images.append(msgspec.structs.replace(part, start=len(ids)))
        _, height, width = part.grid
        # Of the width of an image in lines, whose tokens are patches of a side or two; else of none.
        lines = [width // it for it in (1, 2) if part.num_tokens == height // it * (width // it + 1) - 1]
        last = lines[0] if lines else part.num_tokens
        ids += [START if it % (last + 1) == last else IMAGE for it in range(part.num_tokens)] + [END]
    return ids, tuple(images)


def image_of(
    seed: int, height: int, width: int, patch_size: int, *, merge: int = 2, has_line_ends: bool = False
) -> PromptImage:
    """Return a random image of so many patches; in lines there is a token of the text between two.

    merge   patches of a side of a token, of which each side of the image has whole ones
    """
    pixels = random.Random(seed).randbytes(3 * height * width * patch_size**2)
    num_tokens = height * width // merge**2 + (height // merge - 1 if has_line_ends else 0)
    return PromptImage(0, num_tokens, (1, height, width), pixels, hashlib.sha256(pixels).digest())


if __name__ == "__main__":
    save_tiny(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "qwen2.5 vl")
