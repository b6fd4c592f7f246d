"""Kernel names as evidence and tables hold them."""

import pytest

from kernels.driver.kernel_names import is_helper, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("hallmark_prefill", "hallmark_prefill"),
        ("void at::native::elementwise_kernel<128, 4, foo>(int, foo)", "at::native::elementwise_kernel"),
        (
            "void at::native::(anonymous namespace)::softmax_warp_forward<float, 3>(float*)",
            "at::native::softmax_warp_forward",
        ),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_TNN", "nvjet_sm90_tst"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)", "fmha_cutlassF_bf16_aligned"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
        ),
        ("void at::(anonymous namespace)::copy<float>(float*)", "at::copy"),
        ("void pytorch_flash::flash_fwd_kernel<Traits<128>, true>(Params)", "pytorch_flash::flash_fwd_kernel"),
    ],
)
def test_name_loses_templates_and_tile_sizes(name: str, short: str) -> None:
    assert short_name(name) == short


def test_only_softmax_of_pytorchs_kernels_is_attention() -> None:
    assert is_helper("at::native::elementwise_kernel")
    assert is_helper("Memcpy DtoD")
    assert is_helper(short_name("void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange>()"))
    assert not is_helper("at::native::softmax_warp_forward")
    assert not is_helper("hallmark_prefill")
