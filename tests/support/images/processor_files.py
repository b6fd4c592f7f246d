"""Folders with the files that an image processor is read from, as the public checkpoints have them."""

import json
from pathlib import Path
from typing import Any

QWEN2_5_VL: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}, "image_token_id": 151655},
    "preprocessor_config.json": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
    },
}
QWEN3_VL: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}, "image_token_id": 151655},
    "preprocessor_config.json": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
}
GLM4V: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "glm4v_moe", "vision_config": {"patch_size": 14}, "image_token_id": 151363},
    "preprocessor_config.json": {
        "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        "do_rescale": True,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
    },
}
PADDLEOCR_VL: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "paddleocr_vl", "vision_config": {"patch_size": 14}, "image_token_id": 100295},
    "preprocessor_config.json": {
        "do_convert_rgb": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "max_pixels": 2822400,
        "merge_size": 2,
        "min_pixels": 147384,
        "patch_size": 14,
        "resample": 3,
        "temporal_patch_size": 1,
    },
}
GEMMA3: dict[str, dict[str, Any]] = {
    "config.json": {
        "model_type": "gemma3",
        "vision_config": {"patch_size": 14, "image_size": 896},
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
    },
    "preprocessor_config.json": {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 256,
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 896, "width": 896},
    },
    "processor_config.json": {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
}
INTERNVL: dict[str, dict[str, Any]] = {
    "config.json": {
        "model_type": "internvl",
        "vision_config": {"model_type": "internvl_vision", "patch_size": [14, 14], "image_size": [448, 448]},
        "image_token_id": 151667,
        "image_seq_length": 256,
        "downsample_ratio": 0.5,
    },
    "preprocessor_config.json": {
        "crop_to_patches": False,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "image_std": [0.229, 0.224, 0.225],
        "max_patches": 12,
        "min_patches": 1,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 448, "width": 448},
    },
    "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
}
PIXTRAL: dict[str, dict[str, Any]] = {
    "config.json": {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral", "patch_size": 14, "image_size": 1540},
        "image_token_index": 10,
        "spatial_merge_size": 2,
    },
    "preprocessor_config.json": {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "PixtralImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": {"height": 14, "width": 14},
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 1540},
    },
    "processor_config.json": {
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "image_token": "[IMG]",
        "patch_size": 14,
        "processor_class": "PixtralProcessor",
        "spatial_merge_size": 2,
    },
}
GEMMA4: dict[str, dict[str, Any]] = {
    "config.json": {
        "model_type": "gemma4",
        "text_config": {"use_bidirectional_attention": None},
        "vision_config": {"model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3},
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
    },
    "processor_config.json": {
        "image_processor": {
            "do_convert_rgb": True,
            "do_normalize": False,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.0, 0.0, 0.0],
            "image_processor_type": "Gemma4ImageProcessor",
            "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": 280,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
        },
        "image_seq_length": 280,
        "processor_class": "Gemma4Processor",
    },
}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
