"""Layouts in which checkpoints pack weights of 4 bits. docs/quantization.md says it in words."""

from enum import Enum


class Packing(Enum):
    """The makers' layouts. Eight codes are one integer of 32 bits, the first in the lowest bits unless said otherwise.

    N, K, G  rows of a weight, its columns, and columns of a group
    """

    AWQ = "awq"  # qweight [K, N / 8], qzeros [K / G, N / 8], scales [K / G, N]; the bits of eight rows are permuted
    GPTQ = "gptq"  # qweight [K / 8, N], qzeros [K / G, N / 8] less 0x11111111, scales [K / G, N]
    GPTQ_V2 = "gptq_v2"  # the same with zero points as they are
    GPTQ_SYMMETRIC = "gptq symmetric"  # the same, whose zero points are all 8, stored as 7 or as 8
    COMPRESSED = "compressed"  # weight_packed [N, K / 8], weight_zero_point [N / 8, K / G], weight_scale [N, K / G]
    COMPRESSED_SYMMETRIC = "compressed symmetric"  # the same without zero points, which are all 8
    # Numbers of 4 bits with a sign and an exponent, two a byte, the first in its low bits. Re-encoded when loaded.
    NVFP4 = "nvfp4"  # weight [N, K / 2], weight_scale e4m3 [N, K / 16], times weight_scale_2, one number
    NVFP4_COMPRESSED = "nvfp4 compressed"  # weight_packed, weight_scale; divided by weight_global_scale
    MXFP4_COMPRESSED = "mxfp4 compressed"  # weight_packed, weight_scale [N, K / 32]: powers of two of 8 bits

    @property
    def is_reencoded(self) -> bool:
        """Return whether weights become numbers of 8 bits in blocks, which sm_90 multiplies, when they are loaded."""
        return self in (Packing.NVFP4, Packing.NVFP4_COMPRESSED, Packing.MXFP4_COMPRESSED)
