"""Known keys of quantization_config and of hf_quant_config.json, by quant_method.

Each is read, without effect on what is computed, or refused but for the values that ask for nothing. A key in none of
these lists is refused, unless it is null: it may say how weights are stored, and a wrong guess is a wrong model.
"""

from collections.abc import Mapping

from qualification.model.fields import Fields
from qualification.model.keys import Keys


def _keys(read: str, without_effect: str = "", refused: Mapping[str, tuple[object, ...]] | None = None) -> Keys:
    own = refused or {}
    return Keys(frozenset(read.split()), frozenset(without_effect.split()) - own.keys(), own)


# How weights were found: calibration data, the order of layers, and how hard was searched. GPTQModel and Optimum write
# these, and transformers 5 writes them for AWQ, too; `static_groups` and `act_group_aware` order columns while scales
# are searched, and a file whose columns stay in another order has `desc_act` or `g_idx`.
_SEARCH = """
    damp_percent damp_auto_increment true_sequential static_groups act_group_aware hyb_act mse dataset tokenizer
    batch_size pad_token_id model_seqlen block_name_to_quantize module_name_preceding_first_block cache_block_outputs
    max_input_length meta v2 v2_alpha v2_memory_device gptaq gptaq_alpha gptaq_memory_device foem hessian
    hessian_chunk_size fail_safe failsafe fallback offload_to_disk offload_to_disk_path pack_impl mock_quantization
    buffered_fwd gc_mode auto_forward_data_parallel wait_for_submodule_finalizers vram_strategy
"""
# Which kernels another program multiplies with, and the names that it gives files.
_KERNELS = """
    backend use_exllama disable_exllama exllama_config use_cuda_fp16 use_marlin do_fuse fuse_max_seq_len modules_to_fuse
    model_name_or_path model_file_base_name
"""
# AutoRound's search, in files that it writes as GPTQ's or AWQ's.
_AUTO_ROUND = """
    autoround_version provider amp iters lr minmax_lr nsamples seqlen train_bs gradient_accumulate_steps
    low_gpu_mem_usage low_cpu_mem_usage enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning
    enable_torch_compile scale_dtype to_quant_block_names super_bits super_group_size sampler not_use_best_mse
    dynamic_max_gap quant_block_list
"""
_OF_4_BITS: Mapping[str, tuple[object, ...]] = {
    "pack_dtype": ("int32", None),
    "data_type": ("int", None),
    "act_bits": (16, 32, None),
    "extra_config": ({}, None),
    "adapter": ({}, None),
    "rotation": (None,),
}

OF_METHOD: Mapping[str, Keys] = {
    "fp8": _keys(
        "quant_method fmt activation_scheme weight_block_size ignored_layers modules_to_not_convert kv_cache_scheme",
        "packed_modules_mapping",  # names that vLLM gives products which it joins
        {
            "scale_fmt": ("ue8m0", "float", None),  # the tensors of scales have one of both dtypes, and both are read
            "dequantize": (False, None),
            "modules_to_convert": ([], None),
            "expert_dtype": ("fp8", None),
        },
    ),
    "fbgemm_fp8": _keys("quant_method activation_scale_ub modules_to_not_convert"),
    "compressed-tensors": _keys(
        "quant_method config_groups format quantization_status ignore kv_cache_scheme sparsity_config transform_config",
        # Notes, and how transformers keeps weights in memory.
        "global_compression_ratio version provider run_compressed use_optimized_inference",
        {"dequantize": (False, None)},
    ),
    "modelopt": _keys(
        "quant_method quantization quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules ignore"
        " config_groups",
        "producer",
        {
            "quantized_layers": ({}, None),
            "moe_quant_algo": (None,),
            "has_zero_point": (False, None),
            "pre_quant_scale": (False, None),
            "smoothquant_val": (None,),
            "clamp_val": (None,),
            "use_meta_recipe": (False, None),
        },
    ),
    "awq": _keys(
        "quant_method bits w_bit group_size q_group_size zero_point version format modules_to_not_convert backend",
        f"sym {_SEARCH} {_KERNELS} {_AUTO_ROUND}",  # what `sym` says, `zero_point` says
        {
            **_OF_4_BITS,
            "desc_act": (False, None),
            "lm_head": (False, None),
            "checkpoint_format": ("gemm", None),
            "method": ("awq", None),
            "modules_in_block_to_quantize": ([], None),
        },
    ),
    "gptq": _keys(
        "quant_method bits group_size desc_act sym lm_head checkpoint_format format dynamic"
        " modules_in_block_to_quantize",
        f"{_SEARCH} {_KERNELS} {_AUTO_ROUND}",
        {**_OF_4_BITS, "is_marlin_format": (False, None), "method": ("gptq", None)},
    ),
    "mxfp4": _keys(
        "quant_method",
        "modules_to_not_convert",  # experts alone have 4 bits, and a tensor that they lack is named
        {"dequantize": (False, None)},
    ),
}
_SEARCH_OF_GROUPS = "observer observer_kwargs"  # how scales were found
GROUP = _keys("targets weights input_activations output_activations format")
# Of the dtypes of scales and zero points the tensors say the same.
NUMBERS = _keys(
    "num_bits type strategy symmetric dynamic group_size block_structure actorder",
    f"scale_dtype zp_dtype {_SEARCH_OF_GROUPS}",
)


def check_keys(fields: Fields, known: Keys, kind: str) -> None:
    """Raise ModelConfigError for a key that is unknown and not null, or whose value is not supported.

    kind  what has these keys, for the message
    """
    for name, harmless in known.refused.items():
        value = fields.given(name)
        if value is not None and not any(type(value) is type(it) and value == it for it in harmless):
            same = " or ".join(("absent", *(str(it).lower() for it in harmless if it is not None)))
            fields.refuse(name, f"{same} (what it asks for is not supported: serve a checkpoint without it)")
    for name in known.unknown(fields.names):
        if fields.has(name):
            fields.refuse(
                name,
                f"absent ({kind} has no such key that is known here: delete it where it is only a note, or serve a "
                "checkpoint without it)",
            )


def check_file_beside(says: Mapping[str, object], beside: Mapping[str, object], source: str) -> None:
    """Raise ModelConfigError where a file beside config.json says otherwise than its quantization_config.

    Makers write both, and config.json is read. Compared are keys that both have and that are read.
    """
    known = OF_METHOD.get(str(says.get("quant_method")), Keys())
    for name in sorted(known.read & says.keys() & beside.keys()):
        values = says[name], beside[name]
        first, second = (it.lower() if isinstance(it, str) else it for it in values)
        if first != second:
            Fields(beside, source).refuse(name, f"{values[0]!r}, as quantization_config of config.json has it")
