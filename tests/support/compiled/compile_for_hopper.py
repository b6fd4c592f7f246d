"""Run without TRITON_INTERPRET: compile each attention kernel for sm_90 as it ships and print what ptxas made of it."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.asymmetric.launch_config import KeyBlocks, asymmetric_tiles
from kernels.asymmetric.portable import PART_KEYS, hallmark_asymmetric
from kernels.latent.launch_config import latent_tiles
from kernels.latent.ordered import hallmark_latent_ordered, hallmark_latent_ordered_combine
from kernels.latent.portable import hallmark_latent, hallmark_latent_combine
from kernels.portable.decode import hallmark_decode, hallmark_decode_combine
from kernels.portable.extend import hallmark_extend
from kernels.portable.launch_config import SHARED_BYTES_HOPPER, Tiles, decode_tiles, padded_head_dim, query_tiles
from kernels.portable.ordered import PART_KEYS as LATENT_PART_KEYS
from kernels.portable.ordered import hallmark_ordered_combine
from kernels.portable.prefill import hallmark_prefill
from kernels.portable.wide import wide_decode_tiles, wide_query_tiles
from support.compiled.gluon_sass import labelled_code, spills_in_product_loop

FLAGS = ("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS", "HAS_SPANS")
INT32_POINTERS = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "page_table_ptr", "context_lens_ptr", "spans_ptr")
FP32_POINTERS = ("sinks_ptr", "part_ptr", "stats_ptr", "part_largest_ptr", "part_denominator_ptr")
GROUP = 4
BF16_BYTES = 2


def configurations() -> Iterator[tuple[str, Any, dict[str, Any], Tiles]]:
    """(name, kernel, constants, tiles) of each shipped bf16 configuration, without a flag and with all of them."""
    for head_dim in (64, 80, 128, 256, 512):
        dims = {"HEAD_DIM": head_dim, "BLOCK_D": padded_head_dim(head_dim)}
        for is_flagged in (False, True):
            flags = {"CAUSAL": True, **dict.fromkeys(FLAGS, is_flagged)}
            unused = {} if is_flagged else {"sinks_ptr": None, "spans_ptr": None}
            constants = {"GROUP": GROUP, "PAGE_SIZE": 16, **dims, **flags, **unused}
            is_wide = head_dim == 512
            tiles = (
                wide_query_tiles(BF16_BYTES, SHARED_BYTES_HOPPER)
                if is_wide
                else query_tiles(head_dim, BF16_BYTES, SHARED_BYTES_HOPPER)
            )
            label = f"d{head_dim} {'all flags' if is_flagged else 'plain'}"
            yield f"prefill {label}", hallmark_prefill, constants, tiles
            yield f"extend {label}", hallmark_extend, constants, tiles
            small = (
                wide_decode_tiles(BF16_BYTES, GROUP, SHARED_BYTES_HOPPER)
                if is_wide
                else decode_tiles(head_dim, BF16_BYTES, GROUP, SHARED_BYTES_HOPPER)
            )
            yield f"decode {label}", hallmark_decode, constants, small
        combine = {**dims, "BLOCK_SPLITS": 32, "HAS_SINKS": True}
        yield f"combine d{head_dim}", hallmark_decode_combine, combine, Tiles(0, 0, 4, 2)


def latent_configurations() -> Iterator[tuple[str, Any, dict[str, Any], Tiles]]:
    """The same of values that are the first numbers of the keys, as published models have them."""
    for latent, group in ((256, 32), (512, 20), (512, 128)):
        dims, parts = {"LATENT": latent, "REST": 64, "BLOCK_L": latent, "BLOCK_R": 64}, {"PART_KEYS": LATENT_PART_KEYS}
        for is_flagged in (False, True):
            flags = {"CAUSAL": True, **dict.fromkeys(FLAGS, is_flagged)}
            unused = {} if is_flagged else {"sinks_ptr": None, "spans_ptr": None}
            label = f"l{latent} h{group} {'all flags' if is_flagged else 'plain'}"
            for name, page_size, is_split, rows in (("prefill", 0, False, 64), ("extend", 16, False, 64),
                                                    ("decode", 16, True, group)):  # fmt: skip
                constants = {"GROUP": group, "PAGE_SIZE": page_size, **dims, **flags, **unused, "IS_SPLIT": is_split}
                yield f"{name} {label}", hallmark_latent, constants, latent_tiles(BF16_BYTES, rows, SHARED_BYTES_HOPPER)
                constants, tiles = constants | parts, latent_tiles(BF16_BYTES, 64, SHARED_BYTES_HOPPER)
                yield f"{name} ordered {label}", hallmark_latent_ordered, constants, tiles
        combine = {"LATENT": latent, "BLOCK_L": latent, "BLOCK_SPLITS": 32, "HAS_SINKS": True}
        yield f"combine l{latent} h{group}", hallmark_latent_combine, combine, Tiles(0, 0, 4, 2)
        yield f"combine ordered l{latent} h{group}", hallmark_latent_ordered_combine, combine, Tiles(0, 0, 4, 2)


def asymmetric_configurations() -> Iterator[tuple[str, Any, dict[str, Any], Tiles]]:
    """The same of values that have fewer numbers than keys, as published models have them."""
    blocks, tiles = KeyBlocks.of(192), asymmetric_tiles(BF16_BYTES, SHARED_BYTES_HOPPER)
    dims = {"FIRST": blocks.first, "REST": blocks.rest, "BLOCK_F": blocks.block_first, "BLOCK_R": blocks.block_rest}
    dims |= {"VALUE": 128, "BLOCK_V": 128, "PART_KEYS": PART_KEYS}
    for is_flagged in (False, True):
        flags = {"CAUSAL": True, **dict.fromkeys(FLAGS, is_flagged)}
        unused = {} if is_flagged else {"sinks_ptr": None, "spans_ptr": None}
        label = f"d192/128 {'all flags' if is_flagged else 'plain'}"
        for name, page_size, is_split in (("prefill", 0, False), ("extend", 16, False), ("decode", 16, True)):
            constants = {"GROUP": 16, "PAGE_SIZE": page_size, **dims, **flags, **unused, "IS_SPLIT": is_split}
            yield f"{name} {label}", hallmark_asymmetric, constants, tiles
    combine = {"HEAD_DIM": 128, "BLOCK_D": 128, "HAS_SINKS": True}
    yield "combine d192/128", hallmark_ordered_combine, combine, Tiles(0, 0, 4, 2)


def compile_kernel(kernel: Any, constants: dict[str, Any], tiles: Tiles) -> Any:
    constants = {**constants, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        is_loose = name in (
            "stride_table",
            "num_splits",
            "window",
            "num_tokens",
            "num_seqs",
            "num_parts",
        )  # do_not_specialize
        if name.endswith("_ptr"):
            signature[name] = "*i32" if name in INT32_POINTERS else "*fp32" if name in FP32_POINTERS else "*bf16"
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if name.endswith("_ptr") or (name.startswith("stride_") and not is_loose):
            attributes[(index,)] = [["tt.divisibility", 16]]
    known = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=known, attrs=attributes)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack (spills) by cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def main() -> None:
    report = {}
    for name, kernel, constants, tiles in (*configurations(), *latent_configurations(), *asymmetric_configurations()):
        compiled = compile_kernel(kernel, constants, tiles)
        found = usage(compiled.asm["cubin"])
        num_wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
        report[name] = {"shared": compiled.metadata.shared, "wgmma": num_wgmma, **found}
        if " ordered " in name and num_wgmma:
            report[name]["in_loop"] = spills_in_product_loop(labelled_code(compiled.asm["cubin"]))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
